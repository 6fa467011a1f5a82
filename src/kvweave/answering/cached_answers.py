"""Decides whether a cached answer is still valid for the documents, and stores new ones.

An answer is valid while no document it was made from has changed; the cache's own commit drops it otherwise. After
documents were added, it is valid only if its evidence is unchanged. A new search must find the same chunks, or others
unrelated to the question. That search runs once per change of the document list, when the answer is asked for or at idle time. Knows no model but the embedding model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.evidence import is_non_answer, is_supported
from kvweave.answer_cache.predictions import PredictionStore
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer, Vector
from kvweave.errors import StoreError
from kvweave.index.documents import DocumentTable, row_id, version_of
from kvweave.options import AskOptions
from kvweave.results import Answer, AnswerCacheHit, Plan, Source, Timing
from kvweave.state.background_budget import BackgroundBudget, Worth
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.text import WORD, clean_text

if TYPE_CHECKING:
    from kvweave.index.search import FoundChunk
    from kvweave.index.vector_index import VectorIndex
    from kvweave.state.judge import Judge, JudgeFit

_LOG = logging.getLogger(__name__)

_UNRELATED_COSINE: Final = 0.2
"""A chunk whose cosine to a question is below this says nothing about it, if it also shares no content word with it.

Sentence encoders give texts about other things about 0 to 0.15. One whose cosines are all higher makes more answers invalid,
never fewer.
"""

_SEARCHED: Final = 5
"""The number of chunks in which a word is looked for."""


@dataclass(frozen=True, slots=True)
class CachedAnswers:
    """The answer cache of a knowledge base, with the documents that its answers are checked against.

    Attributes:
        index: opens the index when first called.
        threshold: τ, the least cosine of near questions, whose answers may be drafts.
        predictions: records what users ask; None for questions that no user asked.
        reranker: the model that orders found chunks again; answers made under another one cannot be checked.
        budget: records what background work was worth; None records nothing.
        waited_s: gives the seconds for which an answer that is computed ahead has yielded to requests.
        accepts: says whether a computed answer is stored.
        error_bound: the greatest expected share of wrong answers among those given on the judge's word, 0..1; 0 gives none.
    """

    answers: AnswerCache
    documents: DocumentTable
    index: "Callable[[], VectorIndex]"
    threshold: float
    predictions: PredictionStore | None = None
    reranker: str | None = None
    budget: BackgroundBudget | None = None
    waited_s: Callable[[], float] = lambda: 0.0
    accepts: Callable[[Answer], bool] = lambda answer: True
    error_bound: float = 0.0

    def find(self, question: str, vector: Callable[[], Vector], options: AskOptions) -> CachedAnswer | None:
        """Return the valid answer to the same question, or None.

        An answer that was made from fewer chunks than are asked for now is valid too if the others do not bear on the
        question; it is then stored under `options`.
        """
        found = self.answers.find(question, vector, options, self.threshold)
        if found is not None:
            return found if self._is_valid(found) and not self.are_words(found) else None
        for narrower in self.answers.narrower(options):
            found = self.answers.find(question, vector, narrower, self.threshold)
            if found is None or self.are_words(found):
                continue
            if self._has_same_evidence(found, options.top_k):
                with _logged_only():
                    return self.answers.move(found, options)
                return found
        return None

    def judged(
        self, question: str, vector: Callable[[], Vector], options: AskOptions, judge: "Judge"
    ) -> CachedAnswer | None:
        """Return the valid answer to a near question if the judge says that it asks the same, or None.

        The best chunks for `question` must hold the answer: what cannot be found in them, such as a bare "yes", is not given.
        """
        near = self.near(question, vector, options, judge.found)
        return None if near is None else self._judged(question, near, judge)

    def promote(self, question: str, options: AskOptions, judge: "Judge") -> bool:
        """Give a pending question the answer to a near one if the judge says that it asks the same; return whether it did.

        It is then asked for without a pass. The answer goes when a document changes that either question's chunks are of.
        """
        vector = self.answers.vector(question, options)
        near = self.near(question, lambda: vector, options, judge.found)
        found = None if near is None else self._judged(question, near, judge)
        if near is None or found is None:
            return False
        versions = {version_of(name) for name in found.chunks} | {chunk.version for chunk in near.chunks}
        origin = AnswerProvenance(frozenset(versions), chunk_names(near.chunks), near.epoch)
        ahead_s = self.answers.ahead_s(found)
        if ahead_s is None:  # a user waited for it
            ahead_s = self.budget.answer_seconds() if self.budget is not None else 0.0
        with self.answers.transaction():
            # Looked at again where nobody else writes: the answer is stored whole and valid, or not at all.
            return self._is_unchanged(near) and self.answers.promote(question, vector, found, origin, ahead_s)

    def near(
        self, question: str, vector: Callable[[], Vector], options: AskOptions, fit: "JudgeFit | None"
    ) -> "NearAnswer | None":
        """Return the answer to put to a judge with this fit: to a near question, and held by the best chunks for this one."""
        epoch = self.answers.epoch
        found = self.answers.near(question, vector, options)
        if found is None or is_non_answer(found.text):
            return None
        if fit is None:
            with _logged_only():
                self.answers.record_near()
            return None
        least = fit.threshold(self.error_bound, self.answers.rejected_scores())
        if least is None:
            return None
        chunks = self.index().search(question, vector(), options.top_k, self.documents.visible_versions())
        if not is_supported(question, found.text, [chunk.text for chunk in chunks]):
            return None
        return NearAnswer(found, chunks, least, epoch)

    def _judged(self, question: str, near: "NearAnswer", judge: "Judge") -> CachedAnswer | None:
        """Return the near answer, with the judge's score, if it is high enough and the answer is still valid."""
        found = near.found
        score = self.answers.judged_score(question, found.stored_for)
        if score is None:
            score = judge.score(found.question, question)
        if not score >= near.least:  # nor where it is NaN
            return None
        # Checked last: a document may have changed while the model judged.
        valid = self._is_valid(found) and self._is_unchanged(near)
        return replace(found, judged=score) if valid else None

    def _is_unchanged(self, near: "NearAnswer") -> bool:
        """Return whether the answer is still stored and no document has changed since it was found."""
        now = self.answers.stored(near.found.question, near.found.options)
        return now is not None and now.text == near.found.text and self.answers.epoch == near.epoch

    def are_words(self, found: CachedAnswer) -> bool:
        """Return whether the documents contain a word that was taken for a typing error (`found.errors`)."""
        visible = self.documents.visible_versions()
        return any(
            error in {word.casefold() for word in WORD.findall(chunk.text)}
            for error in found.errors
            for chunk in self.index().search(error, found.vector, _SEARCHED, visible)
        )

    def answer(self, found: CachedAnswer, began: float, judge_s: float = 0.0) -> Answer:
        """Return a cached answer as the answer to a request that began at `began` (`time.perf_counter`)."""
        took_s = time.perf_counter() - began
        hit = AnswerCacheHit(found.stored_for, found.similarity, found.made_at_s, found.judged)
        plan = Plan(found.options.recipe, 0.0, (), cache_hit=hit)
        timing = Timing(retrieve_s=took_s - judge_s, ttft_s=took_s, total_s=took_s, judge_s=judge_s)
        return Answer(found.text, found.sources, plan, timing)

    def record_hit(self, found: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """Count a hit; a question in other words is queued for an answer of its own."""
        with _logged_only(), self.answers.transaction():
            self.answers.record_hit(found, question, vector)
            ahead_s = self.answers.ahead_s(found)
            if self.budget is not None and ahead_s is not None:
                self.budget.add_worth(Worth(hits=1, saved_s=ahead_s))
            if self.predictions is not None:
                self.predictions.predicted.record_hit(found.question)
                self.predictions.record_question(clean_text(question))

    def keep(
        self,
        question: str,
        vector: Vector,
        options: AskOptions,
        text: str,
        sources: "Sequence[Source]",
        origin: AnswerProvenance,
        *,
        took_s: float = 0.0,
    ) -> None:
        """Store an answer unless a document it was made from has changed meanwhile. A failing store is logged.

        `took_s` is how long computing it took, pauses for requests included.
        """
        with _logged_only(), self.answers.transaction():
            if self.predictions is not None:
                self.predictions.record_question(clean_text(question))
            if origin.versions <= self.documents.visible_versions():
                asked, ahead_s = self.predictions is not None, max(0.0, took_s - self.waited_s())
                kept = (question, vector, options, text, sources, origin)
                stored = self.answers.put(*kept, asked=asked, ahead_s=ahead_s)
                if stored and not asked and self.budget is not None:
                    self.budget.add_worth(Worth(entries=1))

    def unchecked(self) -> Iterator[CachedAnswer]:
        """Yield the answers that `refresh` would check."""
        return (found for found in self.answers.unchecked() if found.options.reranker == self.reranker)

    def refresh(self, progress: Progress = no_progress, between: Callable[[], None] = lambda: None) -> int:
        """Check every answer that newer documents may have made invalid; return how many are.

        Those are dropped and their questions queued. Safe to interrupt: each result is stored at once. `between` is
        called before each check.
        """
        unseen = list(self.unchecked())
        invalid = 0
        for number, found in enumerate(unseen):
            progress("checking answers", number, len(unseen))
            between()
            invalid += not self._is_valid(found)
        progress("checking answers", len(unseen), len(unseen))
        return invalid

    def _is_valid(self, found: CachedAnswer) -> bool:
        """Return whether a new search finds the answer's evidence and no other, and store the result."""
        epoch = self.answers.epoch
        if found.epoch == epoch:
            return True
        same = self._has_same_evidence(found, found.options.top_k)
        if same:
            self.answers.confirm(found, epoch)
        elif same is not None:
            self.answers.invalidate(found)
        return bool(same)

    def _has_same_evidence(self, found: CachedAnswer, top_k: int) -> bool | None:
        """Return whether a search for the answer's question finds no evidence but that of the answer.

        None if the index is lost; the request itself reports that.
        """
        visible = self.documents.visible_versions()
        chunks = self.index().search(found.question, found.vector, top_k, visible)
        if not chunks:
            return None
        names = chunk_names(chunks)
        new = [chunk for chunk, name in zip(chunks, names, strict=True) if name not in found.chunks]
        return not any(map(_bears_on_question, new))


class NearAnswer(NamedTuple):
    """An answer to put to the judge: the chunks that hold it, the least score, the epoch in which it was found."""

    found: CachedAnswer
    chunks: "Sequence[FoundChunk]"
    least: float
    epoch: int


def _bears_on_question(chunk: "FoundChunk") -> bool:
    """Return whether a found chunk shares a content word with the question, or is near to it."""
    reason = chunk.reason
    return reason.word_rank is not None or reason.cosine is None or reason.cosine >= _UNRELATED_COSINE


def provenance(found: "Sequence[FoundChunk]", epoch: int) -> AnswerProvenance:
    """Return the provenance of an answer from these chunks; `epoch` was read before the search."""
    return AnswerProvenance(frozenset(chunk.version for chunk in found), chunk_names(found), epoch)


def chunk_names(found: "Sequence[FoundChunk]") -> tuple[str, ...]:
    """Return the chunks' names in the index."""
    return tuple(row_id(chunk.version, chunk.position) for chunk in found)


@contextmanager
def _logged_only() -> Iterator[None]:
    """Log a failure of the answer cache: the caller has its answer already."""
    try:
        yield
    except (StoreError, OSError) as error:
        _LOG.warning("the answer cache could not be written to: %s", error)
