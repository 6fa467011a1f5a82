"""Other wordings of asked and predicted questions, written by the model, screened, and stored ahead.

A wording gets the answer of its question if a search for it finds the same chunks. Otherwise it is queued as a predicted
question and gets an answer of its own. Only wordings that the answer cache does not match by itself are stored.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from kvweave.answer_cache.evidence import is_supported, keeps_decisive_words, parse_questions
from kvweave.answer_cache.guard import changes_meaning
from kvweave.answer_cache.matching import similarity
from kvweave.answer_cache.predictions import HISTORY_LIMIT, DropReason
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer, Vector
from kvweave.answering.cached_answers import provenance
from kvweave.answering.kb_question import best_chunks
from kvweave.background.prediction import QuestionPredictor
from kvweave.text import clean_text


@dataclass(frozen=True, slots=True)
class _Wording:
    """A wording with its vector, why it is dropped, what is found for it, and whether that is its question's evidence."""

    text: str
    vector: Vector
    dropped: DropReason | None
    origin: AnswerProvenance
    same_evidence: bool


@dataclass(frozen=True, slots=True)
class Paraphraser:
    """Writes and stores other wordings of questions that have an answer under the predictor's options.

    `answer_s` returns the mean seconds of answering a question ahead.
    """

    predictor: QuestionPredictor
    answer_s: Callable[[], float | None]

    def questions(self) -> Iterator[str]:
        """Yield the answered questions that were not put in other words yet: those of users, the latest first, then others."""
        history, predicted = self.predictor.predictions.history, self.predictor.predictions.predicted
        questions = chain(reversed(history.recent(HISTORY_LIMIT)), predicted.kept())
        return (one for one in questions if not predicted.is_paraphrased(one) and self._answer_to(one))

    def do(self, question: str) -> int:
        """Write and store wordings of a question; return how many were stored with its answer."""
        found = self._answer_to(question)
        most = self.predictor.prompts.wordings
        request = self.predictor.prompts.paraphrase(question, most)
        wordings: list[_Wording] = []
        if found is not None and request is not None:
            reply = self.predictor.reply((), request, 0)
            for text in parse_questions(reply, most):
                wording = self._wording(clean_text(text), found)
                if wording is not None:
                    wordings.append(wording)
        with self.predictor.answers.transaction():
            self.predictor.predictions.predicted.mark_paraphrased(question)
            if found is None or not self._is_current(found):
                return 0  # another answer came, or the documents changed
            return sum(self._store(wording, found) for wording in wordings)

    def _answer_to(self, question: str) -> CachedAnswer | None:
        """Return the answer stored for these very words and valid in this epoch, or None."""
        found = self.predictor.answers.stored(question, self.predictor.options)
        return found if found is not None and found.epoch == self.predictor.answers.epoch else None

    def _is_current(self, found: CachedAnswer) -> bool:
        now = self._answer_to(found.question)
        return now is not None and (now.text, now.chunks) == (found.text, found.chunks)

    def _wording(self, text: str, found: CachedAnswer) -> _Wording | None:
        """Return a wording, screened; None if it is known or recognised anyway."""
        predictor, answers, options = self.predictor, self.predictor.answers, self.predictor.options
        known = text == found.question or predictor.predictions.predicted.contains(text)
        if known or answers.matcher.is_time_sensitive(text) or answers.stored(text, options) is not None:
            return None
        context, epoch = predictor.context(), answers.epoch
        vector = context.encoder.encode([text])[0]
        cosine = similarity(vector, found.vector)
        if answers.matcher.same(text, found.question, cosine, predictor.threshold):
            return None
        chunks = best_chunks(context.index, predictor.documents, text, vector, options.top_k)
        texts = [chunk.text for chunk in chunks]
        fault = predictor.fault(text, vector, texts)
        differs = not keeps_decisive_words(found.question, text) or changes_meaning(found.question, text)
        if fault is None and (cosine < predictor.threshold or differs):
            fault = "other meaning"
        origin = provenance(chunks, epoch)
        same = set(origin.chunks) == set(found.chunks) and is_supported(text, found.text, texts)
        return _Wording(text, vector, fault, origin, same)

    def _store(self, wording: _Wording, found: CachedAnswer) -> bool:
        """Store a wording, in the caller's transaction; return whether it got the answer."""
        predictor, answers, options = self.predictor, self.predictor.answers, self.predictor.options
        text, vector, versions = wording.text, wording.vector, wording.origin.versions
        if not versions <= predictor.documents.visible_versions():
            return False
        if answers.stored(text, options) is not None:
            return False  # it was asked meanwhile and has an answer of its own
        predictor.predictions.predicted.add(text, "paraphrase", versions, wording.dropped)
        if wording.dropped is not None:
            return False
        if not wording.same_evidence:
            answers.add_predicted(text, vector, options)
            return False
        ahead_s = answers.ahead_s(found) or self.answer_s() or 0.0
        kept = (text, vector, options, found.text, found.sources, wording.origin)
        return answers.put(*kept, asked=False, ahead_s=ahead_s)
