"""What a worker does for the requests of one step before vLLM's own pass: place stored KV, select, recompute; or prepare a chunk."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_chunks, digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import NewEntries, SelectedRows, store_entries
from kvweave_vllm.engine import VllmEngine
from kvweave_vllm.passes import RequestRows
from kvweave_vllm.reads import Load, Read, Reader

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Since the start: requests, their claimed tokens, the rows among them that were computed, and requests whose KV could not be reused."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    failed: int = 0


@dataclass(slots=True)
class Weaver:
    """Puts the KV of requests into their blocks, by their recipes."""

    engine: VllmEngine
    store: KVStore
    reader: Reader
    counts: Counts = field(default_factory=Counts)

    def weave(self, loads: Sequence[Load]) -> None:
        """Do what each request asks; the rows that are left run in one pass. What fails is computed by vLLM's model instead."""
        waiting: list[RequestRows] = []
        for load in loads:
            if load.first and waiting:  # its first blocks may be those of a request before it in this step
                self.engine.passes.run(waiting)
                waiting = []
            rows = self._rows_of(load)
            if len(rows.rows):
                waiting.append(rows)
        if waiting:
            self.engine.passes.run(waiting)

    def _rows_of(self, load: Load) -> RequestRows:
        """Place the stored KV of a request and return the rows that are left to compute."""
        blocks, ids = torch.tensor(load.blocks, dtype=torch.int32), torch.tensor(load.token_ids)
        self.engine.use_blocks(blocks, load.first)
        self.counts.requests += 1
        self.counts.tokens += load.task.end - load.first
        try:
            rows = self._prepare(load) if load.task.previous is not None else self._reuse(load)
        except Exception:
            # The blocks are claimed, so their KV has to come from somewhere: the request must not fail with the store.
            _LOG.exception("computing all chunks of request %s, since reusing their KV failed", load.request)
            self.counts.failed += 1
            rows = torch.arange(load.first, load.task.end)
        self.counts.rows += len(rows)
        return RequestRows(rows, ids, blocks)

    def _reuse(self, load: Load) -> Tensor:
        # Where vLLM schedules a part of the question, its blocks hold that part: tokens are selected by it.
        tokens = len(load.blocks) * self.engine.passes.block_tokens
        with closing(self.reader.take(load)) as read:
            return self._placed(load, read.first(load, tokens, self.store))

    def _placed(self, load: Load, read: Read) -> Tensor:
        """Place what was read, select, and return the rows to compute; those whose KV is worth storing are computed here."""
        request, matched = read.request, read.matched
        recipe, engine, prompt = load.task.recipe, self.engine, request.prompt
        placement = recipe.place.place(request, matched)
        kv_cache = engine.new_cache(prompt.tokens, placement.spans, placement.positions)
        state = PrefillState(request, kv_cache, matched, recipe.attend)
        selected = state.stored_chunks if request.budget.recomputes_all else recipe.select.choose(state)
        selected, state.spaced[:] = engine.passes.heads.agreed((selected, list(state.spaced)))
        rows = torch.cat([selected, state.fresh]).sort().values
        rows = rows[(rows >= load.first) & (rows < load.task.end)]
        engine.place(kv_cache)
        new = NewEntries(recipe, state)
        new.spans = [number for number in new.spans if prompt.spans[number].start >= load.first]
        # Where all layers have windows, vLLM has no blocks for the tokens out of reach: rows there show nothing of a shift.
        windows = engine.geometry.windows
        shifts = recipe.recompute.writes_reused and not (windows and all(windows))
        if not len(rows) or not (new.spans or shifts):
            return rows
        recompute = recipe.recompute if shifts else SelectedRows()
        recompute.run(state, rows, new.hooks, capture=bool(new.spans))
        store_entries(list(new.of(kv_cache)), self.store, engine.fingerprint)
        self.counts.rows += len(rows)
        return rows[:0]

    def _prepare(self, load: Load) -> Tensor:
        """Store what the recipe prepares of the last chunk; the request's blocks are the room for it."""
        prefix, *others, chunk = (
            load.token_ids[start:end] for start, end in ((0, load.task.spans[0][0]), *load.task.spans)
        )
        alike = len(others) - (load.task.previous or 0)
        corpus = _Given(others[:alike], others[alike:])
        prepare_chunks(PrepareContext(self.engine, self.store, prefix, corpus), [chunk], load.task.recipe)
        return torch.arange(0)


@dataclass(frozen=True, slots=True)
class _Given:
    """The chunks that a request brings for one chunk to be prepared after, as a corpus."""

    alike: Sequence[Ids]
    before: Sequence[Ids]

    @property
    def size(self) -> int:
        return 1 + len({*self.alike, *self.before})

    @property
    def digest(self) -> str:
        return digest_chunks(map(digest_tokens, (*self.alike, *self.before)))

    def similar(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        return self.alike[:limit]

    def previous(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        return self.before[max(0, len(self.before) - limit) :]
