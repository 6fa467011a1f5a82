"""The answer cache beside the documents: decides whether a cached answer is still valid, and stores new ones.

An answer is valid while no document it was made from has changed; the cache's own commit drops it otherwise. After
documents were added, it is valid only if its evidence is unchanged. A new search must find the same chunks, or others
unrelated to the question. That search runs once per change of the document list, when the answer is asked for or at idle time. Knows no model but the embedding model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.english.normalize import EXACT, clean_text, normalize
from kvweave.answer_cache.evidence import WORD
from kvweave.answer_cache.matching import READING, plain_words
from kvweave.answer_cache.near_misses import NearMiss
from kvweave.answer_cache.predictions import PredictionStore
from kvweave.answer_cache.records import AnswerProvenance, CachedAnswer, Vector
from kvweave.answering.agreement import agree, says_whether, support
from kvweave.errors import StoreError
from kvweave.index.documents import DocumentTable, row_id
from kvweave.options import AskOptions
from kvweave.results import Answer, AnswerCacheHit, Plan, Source, Timing
from kvweave.state.background_budget import BackgroundBudget, Worth
from kvweave.state.knowledge_base_state import Progress, no_progress

if TYPE_CHECKING:
    from kvweave.index.search import FoundChunk
    from kvweave.index.vector_index import VectorIndex

_LOG = logging.getLogger(__name__)

_UNRELATED_COSINE: Final = 0.2
"""A chunk whose cosine to a question is below this says nothing about it, if it also shares no content word with it.

Sentence encoders give texts about other things about 0 to 0.15. One whose cosines are all higher makes more answers invalid,
never fewer.
"""

_MOST_NEAR: Final = 4
"""How many near misses are looked at, to find one that is still valid."""

_LEAST_SUPPORT: Final = 0.9
"""The share of an answer's content words that the chunks hold which another question retrieves too."""

_SEARCHED: Final = 5
"""In how many chunks a word is looked for."""


@dataclass(frozen=True, slots=True)
class CachedAnswers:
    """The answer cache of a knowledge base.

    Attributes:
        answers: the stored questions and answers.
        documents: the list of documents.
        index: opens the index when first called.
        threshold: τ, the least cosine similarity of two questions that may share an answer.
        predictions: records what users ask; None for questions that no user asked.
        reranker: the model that orders found chunks again; answers made under another one cannot be checked.
        budget: records what background work was worth; None records nothing.
        waited_s: gives the seconds for which an answer that is computed ahead has yielded to requests.
        error_bound: the share of answers to questions that are near but not certainly the same that may be wrong; 0 gives none.
        accepts: says whether a computed answer is stored; None stores all.
    """

    answers: AnswerCache
    documents: DocumentTable
    index: "Callable[[], VectorIndex]"
    threshold: float
    predictions: PredictionStore | None = None
    reranker: str | None = None
    budget: BackgroundBudget | None = None
    waited_s: Callable[[], float] = lambda: 0.0
    error_bound: float = 0.0
    accepts: Callable[[Answer], bool] | None = None

    def find(self, question: str, vector: Callable[[], Vector], options: AskOptions) -> CachedAnswer | None:
        """Return the valid answer to the same question, or None.

        An answer that was made from fewer chunks than are asked for now is valid too if the others do not bear on the
        question; it is then stored under `options`.
        """
        found, near = self.answers.look_up(question, vector, options, self.threshold)
        if found is not None:
            return found if self._is_valid(found) and not self._is_another(found, question) else None
        for narrower in self.answers.narrower(options):
            found = self.answers.find(question, vector, narrower, self.threshold)
            if found is None or self._is_another(found, question):
                continue
            if self._has_same_evidence(found, options.top_k):
                with _logged_only():
                    return self.answers.move(found, options)
                return found
        return self._checked(question, vector, options, near)

    def _checked(
        self,
        question: str,
        vector: Callable[[], Vector],
        options: AskOptions,
        near: Sequence[NearMiss],
    ) -> CachedAnswer | None:
        """Return the nearest valid answer that may be the question's, if it passes its checks; remember it to be judged.

        The checks: the verdicts on earlier answers allow it, and what the question retrieves holds the answer. Of the questions that
        are read alike, which come first, several are tried; of the others, the nearest.
        """
        alike = [miss for miss in near if miss.kind == READING]
        others = [miss for miss in near if miss.kind != READING]
        for miss in [*alike[:_MOST_NEAR], *others[:_MOST_NEAR]]:
            if not self._is_valid(miss.answer) or self._is_another(miss.answer, question):
                continue
            served = self.answers.may_serve(miss, self.error_bound) and self._is_held(
                miss.answer, question, vector()
            )
            with _logged_only():
                self.answers.remember(question, options, miss)
            if served:
                return miss.answer
            if miss.kind != READING:
                return None
        return None

    def _is_held(self, found: CachedAnswer, question: str, vector: Vector) -> bool:
        """Return whether another question retrieves chunks that the answer was made from, and these hold the answer."""
        visible = self.documents.visible_versions()
        chunks = self.index().search(question, vector, found.options.top_k, visible)
        texts = [
            chunk.text
            for chunk, name in zip(chunks, chunk_names(chunks), strict=True)
            if name in found.chunks
        ]
        return support(found.text, texts) >= _LEAST_SUPPORT

    def _is_another(self, found: CachedAnswer, question: str) -> bool:
        """Return whether an answer is seen to be none to a question that is taken for its own.

        Where typing errors are words, or where it says yes ("Is it known who won?") and the question asks for more.
        """
        silent = says_whether(found.text) and plain_words(clean_text(question)) != plain_words(found.question)
        return self.are_words(found) or (silent and normalize(question).asks not in ("whether", EXACT))

    def are_words(self, found: CachedAnswer) -> bool:
        """Return whether what was taken for a typing error (`found.errors`) is a word of the documents."""
        visible = self.documents.visible_versions()
        return any(
            error in {word.casefold() for word in WORD.findall(chunk.text)}
            for error in found.errors
            for chunk in self.index().search(error, found.vector, _SEARCHED, visible)
        )

    def draft(self, vector: Vector, options: AskOptions) -> str:
        """Return the answer to the nearest question as a draft for the model to verify; empty if none is near.

        The nearest question may be another one, and its answer may be invalid.
        """
        nearest = self.answers.nearest(vector, options, self.threshold)
        return "" if nearest is None else nearest.text

    def answer(self, found: CachedAnswer, began: float) -> Answer:
        """Return a cached answer as the answer to a request that began at `began` (`time.perf_counter`)."""
        took_s = time.perf_counter() - began
        plan = Plan(
            found.options.recipe,
            0.0,
            (),
            cache_hit=AnswerCacheHit(found.question, found.similarity, found.made_at_s),
        )
        timing = Timing(retrieve_s=took_s, ttft_s=took_s, total_s=took_s)
        return Answer(found.text, found.sources, plan, timing)

    def record_hit(self, found: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """Count a hit; a question in other words is queued for an answer of its own."""
        with _logged_only(), self.answers.transaction():
            self.answers.record_hit(found, question, vector)
            ahead_s = self.answers.ahead_s(found)
            if self.budget is not None and ahead_s is not None:
                self.budget.add_worth(Worth(hits=1, saved_s=ahead_s))
            if self.predictions is not None:
                self.predictions.record_hit(found.question)
                self.predictions.record_question(clean_text(question))

    def keep(
        self,
        question: str,
        vector: Vector,
        options: AskOptions,
        answer: "Answer | KeptAnswer",
        origin: AnswerProvenance,
    ) -> None:
        """Store an answer unless a document it was made from has changed meanwhile. A failing store is logged."""
        if self.accepts is not None and isinstance(answer, Answer) and not self.accepts(answer):
            return
        with _logged_only(), self.answers.transaction():
            if self.predictions is not None:
                self.predictions.record_question(clean_text(question))
            if origin.versions <= self.documents.visible_versions():
                asked = self.predictions is not None
                ahead_s = (
                    max(0.0, answer.timing.total_s - self.waited_s()) if isinstance(answer, Answer) else 0.0
                )
                kept = (question, vector, options, answer.text, answer.sources, origin)
                stored = self.answers.put(*kept, asked=asked, ahead_s=ahead_s)
                self.answers.judge(question, options, partial(agree, answer.text))
                if stored and not asked and self.budget is not None:
                    self.budget.add_worth(Worth(entries=1))

    def queue(self, question: str, vector: Vector, options: AskOptions) -> None:
        """Queue a question for an answer of its own: it was answered where more was said than the question."""
        with _logged_only(), self.answers.transaction():
            if self.predictions is not None:
                self.predictions.record_question(clean_text(question))
            self.answers.add_asked(question, vector, options)

    def unchecked(self) -> Iterator[CachedAnswer]:
        """Yield the answers that `refresh` would check."""
        return (found for found in self.answers.unchecked() if found.options.reranker == self.reranker)

    def refresh(
        self,
        progress: Progress = no_progress,
        between: Callable[[], None] = lambda: None,
    ) -> int:
        """Check every answer that newer documents may have made invalid; return how many are.

        Those are dropped and their questions queued. Safe to interrupt: each verdict is stored at once. `between` is
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
        """Return whether the answer's evidence is what its question would be answered from, and store the verdict."""
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


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What is kept of an answer: its text, and the chunks in its prompt."""

    text: str
    sources: tuple[Source, ...]


def _bears_on_question(chunk: "FoundChunk") -> bool:
    """Return whether a found chunk shares a content word with the question, or is near to it."""
    reason = chunk.reason
    return reason.word_rank is not None or reason.cosine is None or reason.cosine >= _UNRELATED_COSINE


def provenance(found: "Sequence[FoundChunk]", epoch: int) -> AnswerProvenance:
    """Return what an answer from these chunks depends on; `epoch` was read before the search."""
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
