"""Questions that were asked before: given their answer if it still counts, kept when they have a new one.

An answer counts if no document it rests on has changed, which the bank's own commit sees to, and if the chunks that a
search finds for its question today are the ones it was made from. The search is made only when the list of documents
has changed since it last was. Knows no model but the embedding model.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.english.words import plain
from kvweave.answer_cache.records import AnswerSettings, CachedAnswer, Provenance, Vector
from kvweave.engine.state import Progress
from kvweave.errors import StoreError
from kvweave.index.documents import DocumentTable, row_id
from kvweave.index.vector_index import FoundChunk, VectorIndex
from kvweave.predict.store import PredictionStore
from kvweave.types import Answer, AnswerCacheHit, Plan, Timing

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedAnswers:
    """The answer bank with what it takes to see whether its answers still count.

    `chunks` gives the index, opened when first needed; `threshold` is τ. `predictions` is told what users ask; None for
    questions that no user asked.
    """

    answers: AnswerCache
    shelf: DocumentTable
    chunks: Callable[[], VectorIndex]
    threshold: float
    predictions: PredictionStore | None = None

    def find(
        self, question: str, vector: Callable[[], Vector], circumstances: AnswerSettings
    ) -> CachedAnswer | None:
        """The answer to the same question, if there is one that counts."""
        cache_hit = self.answers.find(question, vector, circumstances, self.threshold)
        return cache_hit if cache_hit is not None and self._counts(cache_hit) else None

    def draft(self, vector: Vector, circumstances: AnswerSettings) -> str:
        """What the answer to a question may be, as it was to the one nearest to it; nothing where none is near.

        That may be another question, and its answer may count no more: whoever takes it has the model check it.
        """
        nearest = self.answers.nearest(vector, circumstances, self.threshold)
        return "" if nearest is None else nearest.text

    def give(self, cache_hit: CachedAnswer, began: float) -> Answer:
        """A banked answer as an answer to a request that began then, on the clock of `time.perf_counter`."""
        took_s = time.perf_counter() - began
        plan = Plan(
            cache_hit.circumstances.recipe,
            0.0,
            (),
            cache_hit=AnswerCacheHit(cache_hit.question, cache_hit.similarity, cache_hit.made_at_s),
        )
        timing = Timing(retrieve_s=took_s, ttft_s=took_s, total_s=took_s)
        return Answer(cache_hit.text, cache_hit.sources, plan, timing)

    def gave(self, cache_hit: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """Count a banked answer that was given; a question that differs from its own waits for a true answer."""
        with _quietly(), self.answers.transaction():
            self.answers.given(cache_hit, question, vector)
            if self.predictions is not None:
                self.predictions.ledger.gave(cache_hit.question)
                self.predictions.asked(plain(question))

    def keep(
        self,
        question: str,
        vector: Vector,
        circumstances: AnswerSettings,
        answer: Answer,
        rests_on: Provenance,
    ) -> None:
        """Keep an answer unless a document it rests on has changed since; a bank that fails does not take it back."""
        with _quietly(), self.answers.transaction():
            if self.predictions is not None:
                self.predictions.asked(plain(question))
            if rests_on.versions <= self.shelf.visible():
                kept = (question, vector, circumstances, answer.text, answer.sources, rests_on)
                self.answers.put(*kept, asked=self.predictions is not None)

    def refresh(
        self,
        progress: Progress = lambda stage, done, total: None,
        between: Callable[[], None] = lambda: None,
    ) -> int:
        """Look at every answer that newer documents may have overtaken; returns how many were.

        Those are forgotten, and their questions wait. Safe to interrupt: what was seen is noted at once. `between` is
        called before each.
        """
        unseen = list(self.answers.unseen())
        overtaken = 0
        for number, cache_hit in enumerate(unseen):
            progress("looking at answers", number, len(unseen))
            between()
            overtaken += not self._counts(cache_hit)
        progress("looking at answers", len(unseen), len(unseen))
        return overtaken

    def _counts(self, cache_hit: CachedAnswer) -> bool:
        """Whether the answer rests on the best chunks for its question; notes what it finds."""
        epoch = self.answers.epoch
        if cache_hit.epoch == epoch:
            return True
        top_k = cache_hit.circumstances.top_k
        found = self.chunks().search(cache_hit.question, cache_hit.vector, top_k, self.shelf.visible())
        if not found:  # the index is lost: the ordinary way says so
            return False
        if set(chunk_names(found)) <= set(cache_hit.chunks):
            self.answers.still_best(cache_hit, epoch)
            return True
        self.answers.stale(cache_hit)
        return False


def provenance(found: Sequence[FoundChunk], epoch: int) -> Provenance:
    """What an answer from these chunks rests on; `epoch` was read before they were searched for."""
    return Provenance(frozenset(chunk.version for chunk in found), chunk_names(found), epoch)


def chunk_names(found: Sequence[FoundChunk]) -> tuple[str, ...]:
    """The chunks' names in the index."""
    return tuple(row_id(chunk.version, chunk.position) for chunk in found)


@contextmanager
def _quietly() -> Iterator[None]:
    """Log what stops the bank: the answer is there already."""
    try:
        yield
    except (StoreError, OSError) as error:
        _LOG.warning("the answer bank could not be written to: %s", error)
