"""Computes the vectors and the KV that listed chunks lack: vectors first, then the KV that a first question needs, then the rest.

Chunks that requests have retrieved come first, the most often retrieved ones before the others. Each entry can be used as soon as it
is stored, and stays if the work is interrupted. If the process is killed, at most one batch has vectors that the list of documents
does not know of; the next run notes them.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from statistics import quantiles
from typing import TYPE_CHECKING, Final

import torch

from kvweave.answering.settings import Settings
from kvweave.config import TRANSFORMERS
from kvweave.embedding import MANY_WINDOWS
from kvweave.errors import InvalidRequest, StoreError
from kvweave.index.documents import ListedChunk
from kvweave.kvstore.keys import digest_tokens
from kvweave.machine import has_fast_matmul
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import Preempted
from kvweave.models.snapshot_adapter import SnapshotAdapter
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.offline import PreparationStep, missing_bytes, preparation_steps
from kvweave.remote.model import RemoteModel, as_engine
from kvweave.results import PrepareReport
from kvweave.state.components import Components, ListedCorpus
from kvweave.state.knowledge_base_state import SWEEP_GRACE_S, KnowledgeBaseState, Progress
from kvweave.state.metadata import KBMetadata
from kvweave.state.preparation import Preparation, PreparationStatus

if TYPE_CHECKING:
    from kvweave.state.active_requests import RequestGuard

_LOG = logging.getLogger(__name__)
BATCH_CHUNKS: Final = 8
_TOGETHER_CHUNKS: Final = 64
"""Batch size for results that depend on which chunks are prepared together."""
_BLOCK_TOKENS: Final = 256
"""Rows that run at once. Fewer are much slower; a waiting request waits for one layer of them, which is short."""
_LIST_S: Final = 10.0
"""Seconds after which the list of missing entries is made again: requests may have retrieved other chunks by then."""
_RECORD_S: Final = 2.0
"""Seconds after which the remaining work is recorded again."""
_WAIT_S: Final = 0.2
_STAGE: Final = "computing KV"
_EMBEDDED_CHUNKS: Final = 16
"""Chunks that are embedded at once. A question to the same process waits for them, a second or two at most."""
_EMBEDDING_STAGE: Final = "embedding"
_RECENT: Final = 12
"""Measurements of a kind of entry that count. Older ones do not: other programs may have begun or ended since."""
_FEWEST: Final = 3


def embedded_chunks() -> int:
    """Return how many chunks are embedded at once; more where bfloat16 is fast, since large batches gain most there."""
    return MANY_WINDOWS if has_fast_matmul(torch.device("cpu"), torch.bfloat16) else _EMBEDDED_CHUNKS


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks that one step prepares together; `kind` is that of the entries it makes."""

    ctx: PrepareContext
    step: PreparationStep
    kind: str
    rows: Sequence[ListedChunk]

    @property
    def tokens(self) -> int:
        return sum(row.kv_tokens for row in self.rows)


class RemainingTime:
    """Estimates how long a run still takes, from its recent speed for each kind of entry.

    Earlier runs do not count: the machine may have been idle then, and be busy now. Nor does the first measurement of a run, in
    which libraries and weights are read for the first time.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._seconds_per_token: dict[str, deque[float]] = {}

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        """Count how long so many tokens of a kind took."""
        if not self._is_first and tokens:
            self._seconds_per_token.setdefault(kind, deque(maxlen=_RECENT)).append(seconds / tokens)
        self._is_first = False

    def estimate(self, left: Mapping[str, int]) -> tuple[float, float] | None:
        """Return about the least and the most seconds for the tokens of each kind that are left.

        They are the quartiles of the recent speed, so one slow chunk changes neither much. None before each kind has
        `_FEWEST` measurements.
        """
        least = most = 0.0
        for kind, tokens in left.items():
            measured = self._seconds_per_token.get(kind, ())
            if len(measured) < _FEWEST:
                return None
            fast, _, slow = quantiles(measured, n=4, method="inclusive")
            least, most = least + tokens * fast, most + tokens * slow
        return least, most


class ChunkPreparer:
    """Prepares the chunks of a knowledge base as the settings' recipe needs them.

    For a model whose attention cannot take stored KV, it only writes vectors.
    """

    def __init__(
        self,
        state: KnowledgeBaseState,
        components: Components,
        settings: Settings,
        metadata: KBMetadata,
        preparation: Preparation,
    ) -> None:
        self._state, self._components = state, components
        self._settings, self._metadata = settings, metadata
        self._preparation = preparation
        self._looked = settings.config.model.engine == TRANSFORMERS

    @property
    def due(self) -> bool:
        """Whether documents were added or removed since everything was prepared; runs a query.

        What vLLM has prepared is known from notes alone, so each process looks once.
        """
        if self._state.database.read_only:
            return False
        return self._preparation.since_s > 0 or (
            not self._looked and bool(self._state.documents.visible_versions())
        )

    def check(self) -> None:
        """Raise InvalidRequest or UnknownRecipe if the settings name no possible recipe."""
        self._settings.recipe()

    def missing(self) -> int:
        """Return how many different chunks lack an entry, including those that exceed the store's limit."""
        model = self._components.model
        return 0 if isinstance(model, SnapshotAdapter) else len(self._missing(self._context(model)))

    @property
    def without_vector(self) -> int:
        """How many chunks have no vector yet; runs a query."""
        return self._state.documents.without_vector_count()

    def left(self) -> tuple[PreparationStatus, int]:
        """Find and record the remaining work, without an estimate of its time: this process has measured none of it.

        Returns:
            The recorded status, and how many chunks exceed the store's limit.
        """
        passed_over: set[str] = set()
        changed_s = self._preparation.changed_s()
        batches = self._remaining(set(), passed_over)
        with suppress(StoreError):  # a full disk
            if batches or self.without_vector:
                self._preparation.mark()
            else:
                self._preparation.unmark(changed_s)
        if batches:
            self._record_left(batches)
        return self._preparation.status(), len(passed_over)

    def work(self, guard: "RequestGuard", progress: Progress, *, wait: bool) -> PrepareReport:
        """Do the remaining work, unless another process does it already; yield to requests as `guard` says.

        Args:
            guard: yields to requests, or raises BackgroundStopped.
            progress: see `Progress`.
            wait: wait for the other process, and do what it leaves.
        """
        computed, embedded, left_out, finished, began = 0, 0, 0, True, time.perf_counter()
        while True:
            with self._preparation.working() as alone:
                if alone:
                    done, finished = self._run(progress, guard)
                    computed, embedded = computed + done.computed, embedded + done.embedded
                    left_out = done.left_out
            # A process that changes documents first marks the change, then looks whether another process works.
            if (alone and not (finished and self.due)) or (not alone and not wait):
                return PrepareReport(computed, left_out, time.perf_counter() - began, embedded)
            if not alone:
                status = self._preparation.status()
                progress(_STAGE, status.chunks - status.left, status.chunks)
                guard.pause(_WAIT_S)

    def run(self, progress: Progress) -> PrepareReport:
        """Do the remaining work now, even if another process does it too; yields to no request."""
        return self._run(progress, None)[0]

    def _run(self, progress: Progress, guard: "RequestGuard | None") -> tuple[PrepareReport, bool]:
        """Do the remaining work.

        Returns:
            The report, and whether it is recorded that nothing is left. It is not if the disk was full.
        """
        run, full_before = _Run(self._preparation, progress, guard), self._state.store.times_full
        while True:
            changed_s = self._preparation.changed_s()  # before the list is read
            run.embedded += self.embed(progress, guard)
            began = time.monotonic()
            batches = self._remaining(run.tried, run.passed_over)
            until = time.monotonic() + max(_LIST_S, 20 * (time.monotonic() - began))
            run.total_tokens = run.done_tokens + sum(batch.tokens for batch in batches)
            self._record_left(batches, run.remaining_time)  # an earlier run's estimate is out of date
            for number, batch in enumerate(batches):
                run.do(batch, self._ids(batch))
                if self._state.store.times_full > full_before:
                    self._record_left(batches[number:], run.remaining_time)
                    return run.report(), False
                if time.monotonic() > run.recorded_s + _RECORD_S:
                    run.recorded_s = time.monotonic()
                    self._record_left(batches[number + 1 :], run.remaining_time)
                if time.monotonic() > until or self.without_vector:
                    break
            else:
                try:
                    if self._preparation.unmark(changed_s):
                        self._looked = True
                        return run.report(), True
                except StoreError as error:
                    _LOG.warning("that all chunks are prepared could not be recorded: %s", error)
                    return run.report(), False

    # Vectors

    def embed(self, progress: Progress, guard: "RequestGuard | None" = None) -> int:
        """Write the missing vectors, yielding to requests between batches; return how many were written.

        Raises ModelNotFound, KnowledgeBaseMismatch, StoreError, and BackgroundStopped if the guard does.
        """
        documents, written, most = self._state.documents, 0, embedded_chunks()
        while batch := documents.without_vector(most):
            if guard is not None:
                guard.yield_to_requests()
            progress(_EMBEDDING_STAGE, written, written + self.without_vector)
            written += self._write_vectors(list(batch.values()))
            self._state.have_vector(list(batch))
        if written:
            self._components.index.sweep(documents.visible_versions(), SWEEP_GRACE_S)
            progress(_EMBEDDING_STAGE, written, written)
        return written

    def _write_vectors(self, row_ids: list[str]) -> int:
        """Write the vectors of rows; skip rows that have one, and rows that were deleted."""
        index, encoder = self._components.index, self._components.encoder
        # Another process may have emptied the knowledge base and filled it with another model.
        self._metadata.check("embedding", encoder.name)
        texts = index.without_vector(row_ids)
        if texts:
            index.write_vectors(list(texts), encoder.encode(list(texts.values())))
        return len(texts)

    # The list of missing entries

    def _context(self, model: Adapter | RemoteModel) -> PrepareContext:
        template = model.template
        corpus = ListedCorpus(
            self._state.documents, self._components.index, self._components.encoder, template
        )
        prefix = template.prefix_ids(self._metadata.system)
        return PrepareContext(as_engine(model), self._state.store, prefix, corpus)

    def _missing(self, ctx: PrepareContext) -> list[tuple[ListedChunk, int]]:
        """Return each different chunk that lacks an entry, with the bytes of all that it lacks."""
        rows = list({row.kv_digest: row for row in self._state.documents.all_chunks()}.values())
        asked = [(row.kv_digest, row.kv_tokens) for row in rows]
        sizes = missing_bytes(ctx, asked, self._settings.recipe())
        return [(rows[number], size) for number, size in sizes.items()]

    def _remaining(self, tried: Set[tuple[str, str]], passed_over: set[str]) -> list[_Batch]:
        """Return the batches of the remaining work in order; add chunks to `passed_over` that exceed the store's limit.

        `tried` has the kinds and digests that are left out. The list is empty for a model that nothing is prepared for.
        """
        model = self._components.model if self._state.documents.visible_versions() else None
        if model is None or isinstance(model, SnapshotAdapter):
            return []
        # Another process may have filled it with another model.
        self._metadata.check_model(model.check_weights())
        ctx = self._context(model)
        since_s = self._preparation.since_s
        added = {
            each.source for each in self._state.documents.all_documents() if 0 < since_s <= each.added_at_s
        }
        times = self._state.store.retrieved_chunks()
        missing = sorted(
            (each for each in self._missing(ctx) if each[0].kv_digest not in passed_over),
            key=lambda each: (
                -times.get(each[0].kv_digest, 0),
                each[0].source not in added,
                each[0].source,
                each[0].position,
            ),
        )
        rows = list(self._fitting(missing, added))
        passed_over |= {row.kv_digest for row, _ in missing} - {row.kv_digest for row in rows}
        return list(self._batches(ctx, rows, tried))

    def _fitting(self, missing: Sequence[tuple[ListedChunk, int]], added: Set[str]) -> Iterator[ListedChunk]:
        """Yield the chunks that fit the store's limit.

        Chunks of the documents in `added` may evict KV that no request has used; others only take free room. More would
        evict KV that was just computed.
        """
        store = self._state.store
        free = store.limit_bytes - store.used_bytes
        for_added = free + store.unused_bytes
        for row, size in missing:
            if size <= (for_added if row.source in added else free):
                free, for_added = free - size, for_added - size
                yield row

    def _batches(
        self, ctx: PrepareContext, rows: Sequence[ListedChunk], tried: Set[tuple[str, str]]
    ) -> Iterator[_Batch]:
        """Yield the first step for all rows, then the other steps for one group of rows after the other."""
        named = [(row.kv_digest, row.kv_tokens) for row in rows]
        first, *others = steps = preparation_steps(self._settings.recipe())
        lacking = {
            step: [
                rows[number]
                for number in step.missing(ctx, named)
                if (step.kind(ctx), rows[number].kv_digest) not in tried
            ]
            for step in steps
        }
        yield from _cut(ctx, first, lacking[first])
        size = max(map(_batch_chunks, steps))
        for start in range(0, len(rows), size):
            group = {row.kv_digest for row in rows[start : start + size]}
            for step in others:
                yield from _cut(ctx, step, [row for row in lacking[step] if row.kv_digest in group])

    def _ids(self, batch: _Batch) -> list[Ids]:
        """Return the token ids of the batch's chunks, without those that were removed meanwhile."""
        texts = self._components.index.texts([row.row_id for row in batch.rows])
        template = batch.ctx.adapter.template
        return list(dict.fromkeys(tuple(template.chunk_ids(text)) for text in texts.values()))

    # What is left

    def _record_left(self, batches: Sequence[_Batch], remaining_time: RemainingTime | None = None) -> None:
        first = preparation_steps(self._settings.recipe())[0]
        tokens = Counter[str]()
        for batch in batches:
            tokens[batch.kind] += batch.tokens
        self._preparation.record_left(
            len({row.kv_digest for batch in batches for row in batch.rows}),
            sum(len(batch.rows) for batch in batches if batch.step == first),
            None if remaining_time is None else remaining_time.estimate(tokens),
        )


def _batch_chunks(step: PreparationStep) -> int:
    return _TOGETHER_CHUNKS if step.across_chunks else BATCH_CHUNKS


def _cut(ctx: PrepareContext, step: PreparationStep, rows: Sequence[ListedChunk]) -> Iterator[_Batch]:
    size = _batch_chunks(step)
    for start in range(0, len(rows), size):
        yield _Batch(ctx, step, step.kind(ctx), rows[start : start + size])


class _Run:
    """One run: the work done so far, and how long it took."""

    def __init__(self, preparation: Preparation, progress: Progress, guard: "RequestGuard | None") -> None:
        self._preparation, self._progress, self._guard = preparation, progress, guard
        self.tried: set[tuple[str, str]] = set()
        self.passed_over: set[str] = set()
        self.embedded = 0
        self.done_tokens = self.total_tokens = 0
        self.recorded_s = 0.0
        self.remaining_time = RemainingTime()
        self._computed: set[str] = set()
        self._batch_tokens = 0  # of the current batch, as far as it is done
        self._began = time.perf_counter()
        self._lap_s = self._worked_s

    def report(self) -> PrepareReport:
        seconds = time.perf_counter() - self._began
        return PrepareReport(len(self._computed), len(self.passed_over), seconds, self.embedded)

    def do(self, batch: _Batch, chunks: Sequence[Ids]) -> None:
        """Prepare a batch, and measure how long its chunks take."""
        if self._guard is not None:
            self._guard.yield_to_requests()
        self._batch_tokens, self._lap_s = 0, self._worked_s
        try:
            self._computed |= {digest_tokens(ids) for ids in self._to_end(batch, chunks)}
        except InvalidRequest as error:  # KV with numbers that cannot be quantised
            if self._guard is None:
                raise
            _LOG.warning("%d chunks are not prepared as %s: %s", len(chunks), batch.kind, error)
        if not self._batch_tokens:  # features, which report no progress
            self._measure(batch, batch.tokens)
        self.tried |= {(batch.kind, row.kv_digest) for row in batch.rows}
        self.done_tokens += batch.tokens
        self._progress(_STAGE, self.done_tokens, self.total_tokens)

    def _measure(self, batch: _Batch, tokens: int) -> None:
        before, self._lap_s = self._lap_s, self._worked_s
        self.remaining_time.add(batch.kind, tokens, self._lap_s - before)

    @property
    def _worked_s(self) -> float:
        """A clock that stands still while the run yields to requests."""
        return time.perf_counter() - (0.0 if self._guard is None else self._guard.waited_s)

    def _to_end(self, batch: _Batch, chunks: Sequence[Ids]) -> set[Ids]:
        """Run the batch's step; start it again if a request stopped a pass that cannot be resumed."""
        adapter: object = batch.ctx.adapter
        assert isinstance(adapter, Adapter | RemoteModel)  # no other engine prepares documents
        while True:
            low = (
                nullcontext()
                if self._guard is None
                else adapter.low_priority(self._guard, block_tokens=_BLOCK_TOKENS)
            )
            with suppress(Preempted), low:
                return batch.step.compute(replace(batch.ctx, progress=self._advance(batch)), chunks)

    def _advance(self, batch: _Batch) -> Callable[[int], None]:
        """Return a function that reports progress within a batch. `do` reports its end."""
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            if done > self._batch_tokens:  # not again, after a request stopped the batch
                self._batch_tokens = done
                self._measure(batch, tokens)
            if done < batch.tokens:
                self._progress(_STAGE, self.done_tokens + done, self.total_tokens)

        return advance
