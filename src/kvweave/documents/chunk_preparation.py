"""Computes what listed chunks lack: vectors first, then the plainest KV of every chunk, dearer work later.

Chunks that requests have retrieved come first, the most often retrieved ones before the others. Each entry can be used as
soon as it is stored, and stays when the work is interrupted. A killed run leaves at most one batch whose vectors are written and not
yet noted; the next run notes them.
"""

import logging
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from kvweave.answering.settings import Settings
from kvweave.embedding import MANY_WINDOWS
from kvweave.errors import InvalidRequest, StoreError
from kvweave.index.documents import ListedChunk
from kvweave.kvstore.keys import digest_tokens
from kvweave.machine import has_fast_matmul
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import Preempted
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.offline import PreparationStep, missing_bytes, preparation_steps
from kvweave.results import PrepareReport
from kvweave.state.components import Components, ListedCorpus
from kvweave.state.knowledge_base_state import SWEEP_GRACE_S, KnowledgeBaseState, Progress
from kvweave.state.metadata import KBMetadata
from kvweave.state.preparation import PASS, Preparation, PreparationStatus

if TYPE_CHECKING:
    from kvweave.state.active_requests import RequestGuard

_LOG = logging.getLogger(__name__)
_BATCH_CHUNKS: Final = 8
_TOGETHER_CHUNKS: Final = 64
"""Chunks that are prepared at once where a result depends on which ones are."""
_BLOCK_TOKENS: Final = 256
"""Rows that run at once. Fewer are slower by far; one layer of these is short beside the prompt of a request that waits."""
_PROBE_TOKENS, _PROBE_S = (32, 128), 0.5
"""Tokens of a short pass and of a longer one, which follows if the short one took at most so many seconds."""
_LIST_S: Final = 10.0
"""How long a list of what is to be done is followed before it is made again: other chunks may be hotter by then."""
_RECORD_S: Final = 2.0
_WAIT_S: Final = 0.2
_STAGE: Final = "computing KV"


_EMBEDDED_CHUNKS: Final = 16
"""Chunks that are embedded at once. A question to the same process waits for them: they take a second or two at most."""
_EMBEDDING_STAGE: Final = "embedding"


@dataclass(frozen=True, slots=True)
class MissingVectors:
    """The vectors that the chunks of a knowledge base lack."""

    state: KnowledgeBaseState
    components: Components
    metadata: KBMetadata
    preparation: Preparation

    @property
    def count(self) -> int:
        """How many chunks have none yet."""
        return self.state.documents.without_vector_count()

    def write(self, progress: Progress, guard: "RequestGuard | None" = None) -> int:
        """Write them all, yielding to requests between two batches; return how many were written.

        Raises ModelNotFound, KnowledgeBaseMismatch, StoreError, and BackgroundStopped as the guard does.
        """
        documents, written, most = self.state.documents, 0, _embedded_chunks()
        while batch := documents.without_vector(most):
            if guard is not None:
                guard.yield_to_requests()
            progress(_EMBEDDING_STAGE, written, written + self.count)
            self.components.encoder.load()  # no part of the rate
            began = time.perf_counter()
            done = self._write(list(batch.values()))
            self.state.have_vector(list(batch))
            if done:
                self.preparation.record_embedding_rate(done / (time.perf_counter() - began))
            written += done
        if written:
            self.components.index.sweep(documents.visible_versions(), SWEEP_GRACE_S)
            progress(_EMBEDDING_STAGE, written, written)
        return written

    def _write(self, row_ids: list[str]) -> int:
        """Write the vectors of rows; those that are there, or whose document is lost or removed, are passed over."""
        index, encoder = self.components.index, self.components.encoder
        self.metadata.check("embedding", encoder.name)  # it may have been emptied and filled with another one
        texts = index.without_vector(row_ids)
        if texts:
            index.write_vectors(list(texts), encoder.encode(list(texts.values())))
        return len(texts)


def _embedded_chunks() -> int:
    """Return how many chunks are embedded at once: more where so many are computed in bfloat16, which is faster by far."""
    return MANY_WINDOWS if has_fast_matmul(torch.device("cpu"), torch.bfloat16) else _EMBEDDED_CHUNKS


@dataclass(frozen=True, slots=True)
class _Batch:
    step: PreparationStep
    kind: str
    rows: Sequence[ListedChunk]

    @property
    def tokens(self) -> int:
        return sum(row.kv_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be done, in order; `ctx` knows the documents that were listed then."""

    ctx: PrepareContext
    batches: list[_Batch]


class ChunkPreparer:
    """Prepares the chunks of a knowledge base as the settings' recipe needs them.

    Nothing but vectors is prepared for a model that stored KV cannot be placed in.
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
        self._vectors = MissingVectors(state, components, metadata, preparation)

    @property
    def due(self) -> bool:
        """Whether documents were added or removed since all was prepared; takes a query."""
        return not self._state.database.read_only and self._preparation.since_s > 0

    def check(self) -> None:
        """Raise InvalidRequest or UnknownRecipe if the settings name no possible recipe."""
        self._settings.recipe()

    def missing(self) -> int:
        """Return how many different chunks lack something, whether it fits the store's limit or not."""
        model = self._components.model
        return len(self._missing(self._context(model))) if isinstance(model, Adapter) else 0

    @property
    def without_vector(self) -> int:
        """How many chunks have no vector yet; takes a query."""
        return self._vectors.count

    def embed(self, progress: Progress) -> None:
        """Write the vectors that are missing, and nothing else."""
        self._vectors.write(progress)

    def left(self) -> tuple[PreparationStatus, int]:
        """Find and record what is left, with an estimate of the time; the first one costs a short pass of the model.

        Returns that, and how many chunks exceed the store's limit.
        """
        passed_over: set[str] = set()
        changed_s = self._preparation.changed_s()
        work = self._work(set(), passed_over)
        batches = [] if work is None else work.batches
        with suppress(StoreError):  # a full disk
            if batches or self._vectors.count:
                self._preparation.mark()
            else:
                self._preparation.unmark(changed_s)
        if work is not None and batches:
            model = work.ctx.adapter.fingerprint.digest
            if all(self._preparation.rate(kind, model) is None for kind in (PASS, batches[0].kind)):
                self._measure_pass(work)
            self._record_left(work.ctx, batches)
        return self._preparation.status(), len(passed_over)

    def work(self, guard: "RequestGuard", progress: Progress, *, wait: bool) -> PrepareReport:
        """Prepare what is left, unless another process is at it; yield to requests as `guard` says.

        Args:
            guard: yields to requests, or raises BackgroundStopped.
            progress: see `Progress`.
            wait: wait for another process that is at it, and do what it leaves.
        """
        computed, embedded, left_out, finished, began = 0, 0, 0, True, time.perf_counter()
        while True:
            with self._preparation.working() as alone:
                if alone:
                    done, finished = self._run(progress, guard)
                    computed, embedded = computed + done.computed, embedded + done.embedded
                    left_out = done.left_out
            # A process that changes documents marks that first, and then looks whether another one is at work.
            if (alone and not (finished and self.due)) or (not alone and not wait):
                return PrepareReport(computed, left_out, time.perf_counter() - began, embedded)
            if not alone:
                status = self._preparation.status()
                progress(_STAGE, status.chunks - status.left, status.chunks)
                guard.pause(_WAIT_S)

    def run(self, progress: Progress, guard: "RequestGuard | None" = None) -> PrepareReport:
        """Prepare what is left now, whatever other processes do; without a guard it yields to no request."""
        return self._run(progress, guard)[0]

    def _run(self, progress: Progress, guard: "RequestGuard | None") -> tuple[PrepareReport, bool]:
        """Return what was done, and whether that is recorded to be all; the mark stays where the disk was full."""
        run, full_before = _Run(self._preparation, progress, guard), self._state.store.times_full
        passed_over: set[str] = set()
        while True:
            changed_s = self._preparation.changed_s()  # before the list is read
            run.embedded += self._vectors.write(progress, guard)
            began = time.monotonic()
            work = self._work(run.tried, passed_over)
            if work is None or not work.batches:
                if (ended := self._ended(changed_s)) is not None:
                    return run.report(len(passed_over)), ended
                continue
            until = time.monotonic() + max(_LIST_S, 20 * (time.monotonic() - began))
            run.total_tokens = run.done_tokens + sum(batch.tokens for batch in work.batches)
            for number, batch in enumerate(work.batches):
                run.do(work.ctx, batch, self._ids(work.ctx, batch.rows))
                if self._state.store.times_full > full_before:
                    self._record_left(work.ctx, work.batches[number:])
                    return run.report(len(passed_over)), False
                if run.record_due():
                    self._record_left(work.ctx, work.batches[number + 1 :])
                if time.monotonic() > until or self._vectors.count:
                    break
            else:
                if (ended := self._ended(changed_s)) is not None:
                    return run.report(len(passed_over)), ended

    def _ended(self, changed_s: float) -> bool | None:
        """Record that all is done; return whether that succeeded, None if the documents have changed meanwhile."""
        try:
            return True if self._preparation.unmark(changed_s) else None
        except StoreError as error:
            _LOG.warning("that all chunks are prepared could not be recorded: %s", error)
            return False

    # What is to be done

    def _context(self, model: Adapter) -> PrepareContext:
        template = model.template
        corpus = ListedCorpus(
            self._state.documents, self._components.index, self._components.encoder, template
        )
        return PrepareContext(model, self._state.store, template.prefix_ids(self._metadata.system), corpus)

    def _missing(self, ctx: PrepareContext) -> list[tuple[ListedChunk, int]]:
        """Return different chunks that lack something, with the bytes that it takes."""
        rows = list({row.kv_digest: row for row in self._state.documents.all_chunks()}.values())
        asked = [(row.kv_digest, row.kv_tokens) for row in rows]
        sizes = missing_bytes(ctx, asked, self._settings.recipe())
        return [(rows[number], size) for number, size in sizes.items()]

    def _work(self, tried: Set[tuple[str, str]], passed_over: set[str]) -> _Work | None:
        """List what is to be done, without what was tried; adds chunks to `passed_over` that exceed the store's limit.

        Returns None if there are no documents, or a model that nothing is prepared for.
        """
        if not self._state.documents.visible_versions():
            return None
        model = self._components.model
        if not isinstance(model, Adapter):
            return None
        self._metadata.check_model(model.fingerprint)  # it may have been emptied and filled with another one
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
        fitting = {row.kv_digest for row in rows}
        passed_over |= {row.kv_digest for row, _ in missing} - fitting
        return _Work(ctx, list(self._batches(ctx, rows, tried)))

    def _fitting(self, missing: Sequence[tuple[ListedChunk, int]], added: Set[str]) -> Iterator[ListedChunk]:
        """Yield the chunks that the store's limit has room for.

        Documents that were added since may evict what was never asked for; others only take free room. More would evict
        what was just computed.
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
        """Yield the first step for all rows, then the others for one group of rows after the other."""
        named = [(row.kv_digest, row.kv_tokens) for row in rows]
        steps = preparation_steps(self._settings.recipe())
        lacking = {
            step: [
                rows[number]
                for number in step.missing(ctx, named)
                if (step.kind(ctx), rows[number].kv_digest) not in tried
            ]
            for step in steps
        }
        yield from self._cut(ctx, steps[0], lacking[steps[0]])
        together = any(step.across_chunks for step in steps)
        size = _TOGETHER_CHUNKS if together else _BATCH_CHUNKS
        for start in range(0, len(rows), size):
            group = {row.kv_digest for row in rows[start : start + size]}
            for step in steps[1:]:
                yield from self._cut(ctx, step, [row for row in lacking[step] if row.kv_digest in group])

    def _cut(
        self, ctx: PrepareContext, step: PreparationStep, rows: Sequence[ListedChunk]
    ) -> Iterator[_Batch]:
        size = _TOGETHER_CHUNKS if step.across_chunks else _BATCH_CHUNKS
        for start in range(0, len(rows), size):
            yield _Batch(step, step.kind(ctx), rows[start : start + size])

    def _ids(self, ctx: PrepareContext, rows: Sequence[ListedChunk]) -> list[Ids]:
        """Return the token ids of chunks; of those that were removed meanwhile, none."""
        texts = self._components.index.texts([row.row_id for row in rows])
        return list(dict.fromkeys(tuple(ctx.adapter.template.chunk_ids(text)) for text in texts.values()))

    # How long it takes

    def _measure_pass(self, work: _Work) -> None:
        """Record the rate of a short pass over the first chunk."""
        adapter = work.ctx.adapter
        ids = next(iter(self._ids(work.ctx, work.batches[0].rows)), ())
        seconds = 0.0
        for tokens in _PROBE_TOKENS:  # the first pass also prepares the kernels
            if ids and seconds < _PROBE_S:
                began = time.perf_counter()
                adapter.encode(ids[:tokens])
                seconds = max(1e-6, time.perf_counter() - began)
                rate = len(ids[:tokens]) / seconds
                self._preparation.record_rate(PASS, adapter.fingerprint.digest, rate)

    def _record_left(self, ctx: PrepareContext, batches: Sequence[_Batch]) -> None:
        model = ctx.adapter.fingerprint.digest
        first = preparation_steps(self._settings.recipe())[0]
        seconds, measured = 0.0, True
        for kind in dict.fromkeys(batch.kind for batch in batches):
            tokens = sum(batch.tokens for batch in batches if batch.kind == kind)
            rate = self._preparation.rate(kind, model)
            measured = measured and rate is not None
            rate = rate or self._preparation.rate(PASS, model)  # the least that it costs
            seconds += tokens / rate if rate is not None else 0.0
        self._preparation.record_left(
            len({row.kv_digest for batch in batches for row in batch.rows}),
            sum(len(batch.rows) for batch in batches if batch.step == first),
            seconds,
            measured=measured,
        )


class _Run:
    """One run: what it has done so far."""

    def __init__(self, preparation: Preparation, progress: Progress, guard: "RequestGuard | None") -> None:
        self._preparation, self.progress, self._guard = preparation, progress, guard
        self.tried: set[tuple[str, str]] = set()
        self.computed: set[str] = set()
        self.embedded = 0
        self.done_tokens = self.total_tokens = 0
        self._recorded_s, self._began = 0.0, time.perf_counter()

    def report(self, left_out: int) -> PrepareReport:
        """Return what was done."""
        seconds = time.perf_counter() - self._began
        return PrepareReport(len(self.computed), left_out, seconds, self.embedded)

    def do(self, ctx: PrepareContext, batch: _Batch, chunks: Sequence[Ids]) -> None:
        """Prepare a batch, and measure how long it takes."""
        if self._guard is not None:
            self._guard.yield_to_requests()
        began, waited = time.perf_counter(), self._waited_s
        try:
            self.computed |= {digest_tokens(ids) for ids in self._to_end(ctx, batch, chunks)}
        except InvalidRequest as error:  # of this KV: numbers that cannot be quantised
            if self._guard is None:
                raise
            _LOG.warning("%d chunks are not prepared as %s: %s", len(chunks), batch.kind, error)
        seconds = time.perf_counter() - began - (self._waited_s - waited)
        self.tried |= {(batch.kind, row.kv_digest) for row in batch.rows}
        self.done_tokens += batch.tokens
        self.progress(_STAGE, self.done_tokens, self.total_tokens)
        self._record_rate(ctx, batch, seconds)

    def record_due(self) -> bool:
        """Whether what is left was last recorded a while ago; it is about to be."""
        due = time.monotonic() > self._recorded_s + _RECORD_S
        if due:
            self._recorded_s = time.monotonic()
        return due

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._guard is None else self._guard.waited_s

    def _to_end(self, ctx: PrepareContext, batch: _Batch, chunks: Sequence[Ids]) -> set[Ids]:
        """Run one step, from its start again where a pass was stopped that cannot be resumed."""
        while True:
            ctx = replace(ctx, progress=_Advance(self, batch.tokens))
            low = (
                nullcontext()
                if self._guard is None
                else ctx.adapter.low_priority(self._guard, block_tokens=_BLOCK_TOKENS)
            )
            with suppress(Preempted), low:
                return batch.step.compute(ctx, chunks)

    def _record_rate(self, ctx: PrepareContext, batch: _Batch, seconds: float) -> None:
        """Average the rate of this kind with what was measured before."""
        model, rate = ctx.adapter.fingerprint.digest, batch.tokens / max(1e-6, seconds)
        before = self._preparation.rate(batch.kind, model)
        if time.monotonic() > self._recorded_s + _RECORD_S or before is None:
            self._preparation.record_rate(batch.kind, model, rate if before is None else (before + rate) / 2)


class _Advance:
    """Reports the tokens of a batch that are done, but for the last ones, which the end of the batch reports."""

    def __init__(self, run: _Run, batch_tokens: int) -> None:
        self._run, self._batch_tokens, self._done = run, batch_tokens, 0

    def __call__(self, tokens: int) -> None:
        self._done += tokens
        if self._done < self._batch_tokens:
            self._run.progress(_STAGE, self._run.done_tokens + self._done, self._run.total_tokens)
