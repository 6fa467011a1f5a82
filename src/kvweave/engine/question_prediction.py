"""Predicts questions with the model: runs the jobs that `predict/planning` chooses and stores the results.

Predicted questions are queued in the answer cache; `background_jobs` computes their KV and answers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.english.normalize import clean_text
from kvweave.answer_cache.records import AnswerSettings, Vector
from kvweave.config import DEFAULT_NEW_TOKENS, GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.kb_question import RequestContext
from kvweave.engine.settings import within_context
from kvweave.index.documents import DocumentTable, version_of
from kvweave.predict.filters import NEAR_DUPLICATE_COSINE, is_answerable, is_near_duplicate, parse_questions
from kvweave.predict.planning import Job, PredictFromDocuments, PredictFromHistory, Summarise, next_job
from kvweave.predict.prompts import PromptSet, prompts_for
from kvweave.predict.store import ChunkRef, PredictionOrigin, PredictionStore, SummaryPart
from kvweave.recipes.recipe import Recipe, run
from kvweave.types import Prompt

BATCH_SHARE: Final = 4
"""A batch of chunks takes at most this fraction (1/4) of the model's context, and so do the summary's parts in a prompt."""

_TEMPERATURE, _TOP_P = 0.8, 0.9  # of all draws from the same notes but the first


def generation_for(draw: int) -> GenerationConfig:
    """Return how a reply is decoded: the first draw greedily, others sampled with their number as seed."""
    if draw == 0:
        return GenerationConfig()
    return GenerationConfig(temperature=_TEMPERATURE, top_p=_TOP_P, seed=draw)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A predicted question with its vector; `answerable` judges by the chunks found for it."""

    question: str
    vector: Vector
    answerable: bool


class QuestionPredictor:
    """Predicts questions as they would be asked under `answer_settings`.

    Args:
        context: loads the parts of a request when first called.
        documents: the list of documents.
        answers: the answer cache.
        predictions: where predictions are made from and stored.
        recipe: how stored chunk KV is reused when the model reads chunks, as for requests.
        answer_settings: the settings under which users are expected to ask.
        system: the instruction that prompts start with.
        threshold: τ.
        stride: how many questions are predicted at a time (PerCache §4.1.2).
    """

    def __init__(
        self,
        context: Callable[[], RequestContext],
        documents: DocumentTable,
        answers: AnswerCache,
        predictions: PredictionStore,
        recipe: Recipe,
        answer_settings: AnswerSettings,
        system: str,
        threshold: float,
        stride: int,
    ) -> None:
        self._context = context
        self._documents = documents
        self._answers = answers
        self._predictions = predictions
        self._recipe = recipe
        self._answer_settings = answer_settings
        self._system = system
        self._threshold = threshold
        self._stride = stride

    def next_job(self) -> Job | None:
        """Return the next job, or None; loads no model if there is none."""

        def batch_tokens() -> int:
            return self._prompts.batch_tokens or self._most_tokens

        return next_job(
            self._predictions, self._listed(), batch_tokens, lambda: self._prompts.earlier_questions
        )

    def chunks_to_summarise(self) -> int:
        """Return how many chunks the corpus summary lacks."""
        return len(self._predictions.summary.missing(self._listed()))

    def do(self, job: Job) -> None:
        """Run a job; it stores nothing before its end."""
        if isinstance(job, Summarise):
            self._summarise(job)
        elif isinstance(job, PredictFromDocuments):
            self._predict_from_documents(job)
        else:
            self._predict_from_history(job)

    # The three jobs

    def _summarise(self, job: Summarise) -> None:
        texts = self._context().index.texts([chunk.name for chunk in job.chunks])
        notes = [texts[chunk.name] for chunk in job.chunks if chunk.name in texts]
        summary = self.reply(notes, self._prompts.summarise(), draw=0) if notes else ""
        with self._answers.transaction():
            if {chunk.version for chunk in job.chunks} <= self._documents.visible_versions():
                self._predictions.summary.put(job.chunks, summary)

    def _predict_from_documents(self, job: PredictFromDocuments) -> None:
        parts = self._that_fit([job.part, *job.others])
        request = self._prompts.predict_from_documents(self._per_reply)
        draws = range(job.round * self._draws, (job.round + 1) * self._draws)
        replies = [self.reply([part.text for part in parts], request, draw) for draw in draws]
        self._store(replies, "knowledge", parts, lambda: self._predictions.summary.record_round(job.part.id))

    def _predict_from_history(self, job: PredictFromHistory) -> None:
        request = self._prompts.predict_from_history(job.earlier, self._per_reply)
        replies: list[str] = []
        used: dict[SummaryPart, None] = {}
        for draw in range(self._draws):
            start = draw % len(job.parts)
            # A model that reads one part at a time gets another one for every draw.
            parts = self._that_fit([*job.parts[start:], *job.parts[:start]])
            used |= dict.fromkeys(parts)
            replies.append(self.reply([part.text for part in parts], request, draw))

        def seen() -> bool:
            self._predictions.history.mark_seen(job.number)
            return True

        self._store(replies, "history", list(used), seen)

    # Asking the model

    @property
    def _prompts(self) -> PromptSet:
        return prompts_for(self._context().adapter.fingerprint.name)

    @property
    def _per_reply(self) -> int:
        return min(self._stride, self._prompts.questions_per_reply)

    @property
    def _draws(self) -> int:
        return math.ceil(self._stride / self._prompts.questions_per_reply)

    @property
    def _most_tokens(self) -> int:
        return self._context().adapter.geometry.context_tokens // BATCH_SHARE

    def _listed(self) -> list[ChunkRef]:
        rows = self._documents.all_chunks()
        return [ChunkRef(row.row_id, version_of(row.row_id), row.kv_tokens) for row in rows]

    def _that_fit(self, parts: Sequence[SummaryPart]) -> list[SummaryPart]:
        """Return as many of the first parts as fit in front of a request, one at least."""
        template, taken, tokens = self._context().adapter.template, list(parts[:1]), 0
        for part in parts:
            tokens += len(template.chunk_ids(part.text))
            if part not in taken:
                if tokens > self._most_tokens:
                    break
                taken.append(part)
        return taken[: self._prompts.max_parts]

    def reply(self, notes: Sequence[str], request: str, draw: int) -> str:
        """Return the model's reply to a request about notes. It depends on nothing else, so a caller may memoize it."""
        context = self._context()
        adapter = context.adapter
        prompt = adapter.template.render(Prompt(request, tuple(notes), self._system, several_lines=True))
        limit = adapter.geometry.context_tokens
        most = min(within_context(None, DEFAULT_NEW_TOKENS, limit), limit - prompt.tokens)
        if most < 1:
            return ""
        result = run(self._recipe, adapter, context.store, prompt)
        decoded = Decoded()
        for _ in generate(
            adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            generation_for(draw),
            most,
            decoded,
            form=prompt.reply,
        ):
            pass
        return decoded.text.strip()

    # Storing what is new

    def _store(
        self,
        replies: Iterable[str],
        origin: PredictionOrigin,
        parts: Sequence[SummaryPart],
        done: Callable[[], bool],
    ) -> None:
        """Store the new questions of some replies; `done`, in the same commit, returns whether the job still counts."""
        asked = [question for reply in replies for question in parse_questions(reply, self._per_reply)]
        new: list[Candidate] = []
        for question in map(clean_text, asked):
            candidate = self._candidate(question, new)
            if candidate is not None:
                new.append(candidate)
        versions = frozenset(version for part in parts for version in part.versions)
        with self._answers.transaction():
            if not versions <= self._documents.visible_versions() or not done():
                return
            for each in new[: self._stride]:
                if each.answerable:
                    self._predictions.predicted.add(each.question, origin, versions)
                    self._answers.add_predicted(each.question, each.vector, self._answer_settings)
                else:
                    self._predictions.predicted.add(each.question, origin, versions, dropped="unanswerable")

    def _candidate(self, question: str, others: Sequence[Candidate]) -> Candidate | None:
        """Return a predicted question unless it is known, nearly known, or depends on the date."""
        if self._predictions.predicted.contains(question) or self._answers.matcher.is_time_sensitive(
            question
        ):
            return None
        context = self._context()
        vector = context.encoder.encode([question])[0]
        near = self._answers.similar(
            vector, self._answer_settings, min(self._threshold, NEAR_DUPLICATE_COSINE)
        )
        near += [(other.question, float(vector @ other.vector)) for other in others]
        if any(self._is_same(question, other, cosine) for other, cosine in near):
            return None
        found = context.index.search(
            question, vector, self._answer_settings.top_k, self._documents.visible_versions()
        )
        return Candidate(question, vector, is_answerable(question, [chunk.text for chunk in found]))

    def _is_same(self, question: str, other: str, cosine: float) -> bool:
        if question == other or is_near_duplicate(question, other, cosine):
            return True
        return self._answers.matcher.same(question, other, cosine, self._threshold)
