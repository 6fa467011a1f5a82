"""A method of KV reuse as a recipe of six slots, and `run`, which prefills a prompt by a recipe.

Each slot answers one question; all but the name have a default. A new method is a file in `methods/` that fills the
slots it changes, and one line in OWN_METHODS. If a method needs an edit here, a slot is wrong.
"""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvweave.cancellation import check_cancelled
from kvweave.errors import DamagedEntry, InvalidRequest, StoreError
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.forward import check_logits
from kvweave.models.fused_cache import FusedCache
from kvweave.models.hooks import AttentionHook
from kvweave.recipes.context import StoreEntry
from kvweave.recipes.features import AttentionRecorder, attention_key
from kvweave.recipes.match import Match, MatchPathThenChunk, warn_if_none_fits
from kvweave.recipes.place import Attend, Causal, Place, TruePositions
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Isolated, Prepare
from kvweave.recipes.request import Budget, Matched, PrefillRequest, PrefillResult
from kvweave.recipes.select import Select, SelectNone
from kvweave.results import Plan, PlanSpan, Timing
from kvweave.types import ModelFingerprint, TokenizedPrompt

_LOG = logging.getLogger(__name__)

MAX_EXACT_VERSIONS = 16
"""How many exact KV entries of a chunk requests may leave, each after other text. Each takes as much room as the prepared
KV that is used at any position; the least used go first."""


class Recompute(Protocol):
    """Slot 5: runs rows through the model and writes their K,V to the KV cache.

    Inherit from it for its default.
    """

    @property
    def writes_reused(self) -> bool:
        """Whether it also changes reused rows that it does not compute: the request then needs a copy of them; by default not."""
        return False

    @abstractmethod
    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Compute prompt positions `rows` (T,), ascending, the last one included; return its logits (1, vocab).

        The last pass must run all fresh rows through all layers, with `hooks` on it. Other stale rows than those in `rows`
        may run too, as long as on average over the layers no more stale rows run than `rows` holds. With `capture`,
        `kv_cache.capture` afterwards holds the unrotated KV of the rows.
        """


@dataclass(frozen=True, slots=True)
class SelectedRows(Recompute):
    """All rows through all layers in one pass: Recompute(T) of the methods page (FusionRAG §3.2, ProphetKV §4.3)."""

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        return state.request.adapter.compute(
            state.kv_cache, state.request.prompt.token_ids, state.plan(rows, *hooks), capture=capture
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """The six slots, and the `ratio` that is the budget of a request without one.

    `name` is what people read and type, such as prophetkv or similar-int8+prophetkv.
    """

    name: str
    prepare: Prepare = field(default_factory=Isolated)
    match: Match = field(default_factory=MatchPathThenChunk)
    place: Place = field(default_factory=TruePositions)
    select: Select = field(default_factory=SelectNone)
    recompute: Recompute = field(default_factory=SelectedRows)
    attend: Attend = field(default_factory=Causal)
    ratio: float = 0.0

    def budget(self, ratio: float | None, coverage: float | None) -> Budget:
        """Return the budget asked for, or the recipe's own; raise InvalidRequest for both at once or an impossible one."""
        if ratio is not None and coverage is not None:
            raise InvalidRequest(f"both ratio {ratio} and coverage {coverage} are given; give one of them")
        if ratio is None and coverage is None:
            return Budget(self.ratio)
        return Budget(ratio or 0.0, coverage)


def run(
    recipe: Recipe,
    adapter: Adapter,
    store: KVStore,
    prompt: TokenizedPrompt,
    *,
    ratio: float | None = None,
    coverage: float | None = None,
    lease: Lease | None = None,
    sink: LayerSink | None = None,
    prefix_context: PrefixContext | None = None,
) -> PrefillResult:
    """Prefill a prompt by a recipe: match → place → select → recompute.

    A damaged entry is dropped from the store and the request starts again, so that the result is as if the entry had
    never been stored. This ends, because no damaged entry is found twice. No entry is written: `remember` stores what
    is worth storing, once the answer is out.

    Args:
        ratio: budget as a share of the stale rows; without a budget the recipe's own is used.
        coverage: budget as a share of the scores.
        lease: holds what the caller prefetched. Entries found are not evicted while it lasts; without one, until this returns.
        sink: receives each layer's KV as soon as the layer is computed, so the full KV is never in memory. If it is
            bounded, the result has no new entries, since these would be held until the end.
        prefix_context: text before the prompt, which the sink appends to.

    Raises InvalidRequest for an impossible budget, PromptTooLong, ModelError for logits of NaN, and whatever the sink raises.
    """
    adapter.check_weights()
    adapter.check_length(prompt.tokens + (len(prefix_context.token_ids) if prefix_context is not None else 0))
    started = time.perf_counter()
    budget = recipe.budget(ratio, coverage)
    with store.lease() if lease is None else nullcontext(lease) as held:
        request = PrefillRequest(adapter, store, prompt, budget, held, prefix_context)
        while True:
            matched: tuple[Matched, ...] = ()
            check_cancelled()
            try:
                matched = recipe.match.find(request, recipe.prepare)
                if all(found.kv is None for found in matched if found.span.kind == "chunk"):
                    warn_if_none_fits(request, recipe.match, recipe.prepare, matched)
                if prefix_context is not None:  # the sink could not start again in the middle of the pass
                    _verify(matched)
                clock = _Clock(started, matched=time.perf_counter())
                state = _place(recipe, request, matched, sink)
                # The whole budget computes exact chunks too: the result must equal full attention.
                selected = state.stored_chunks if budget.recomputes_all else recipe.select.choose(state)
                clock.selected, clock.placed_s = time.perf_counter(), state.kv_cache.place_s
                new = NewEntries(recipe, state, sink)
                hooks = new.hooks if sink is None else [*new.hooks, sink]
                rows = torch.cat([selected, state.fresh]).sort().values
                check_cancelled()
                logits = recipe.recompute.run(state, rows, hooks, capture=bool(new.spans))
                check_logits(logits, adapter.fingerprint.name)
                return _result(recipe, state, selected, logits, new, clock)
            except DamagedEntry as error:
                # Damage rarely comes alone: with all of it dropped, the next attempt is the last.
                _verify(matched, DamagedEntry)
                _LOG.warning("retrying without an entry that cannot be used: %s", error)


def remember(result: PrefillResult) -> int:
    """Store what a request computed and is worth storing; return how many entries the store took. See `store_entries`."""
    return store_entries(result.new_entries, result.request.store, result.request.adapter.fingerprint)


def store_entries(entries: Sequence[StoreEntry], store: KVStore, model: ModelFingerprint) -> int:
    """Store entries of a model; return how many the store took.

    Log a store that fails, and do not raise: the result that they came with is valid without them.
    """
    try:
        return sum(entry.put(store, model) for entry in entries)
    except (StoreError, OSError, InvalidRequest) as error:
        _LOG.warning("what this request computed is not stored: %s", error)
        return 0


def _verify(matched: Sequence[Matched], *ignored: type[Exception]) -> None:
    """Check all KV that was found, which drops damaged entries from the store; raise DamagedEntry at the first, unless ignored."""
    for found in matched:
        if found.kv is not None:
            with suppress(*ignored):
                verify_content(found.kv)


@dataclass(slots=True)
class _Clock:
    """When the steps of a request ended (`time.perf_counter`), and the seconds spent placing KV while selecting."""

    started: float
    matched: float
    selected: float = 0.0
    placed_s: float = 0.0

    def timing(self, place_s: float) -> Timing:
        """Return the timing of a request that ends now and spent `place_s` placing KV."""
        done = time.perf_counter()
        return Timing(
            match_s=self.matched - self.started,
            place_s=place_s,
            select_s=self.selected - self.matched - self.placed_s,  # a selector that runs the model places KV
            recompute_s=done - self.selected - (place_s - self.placed_s),
            ttft_s=done - self.started,
            total_s=done - self.started,
        )


def _place(
    recipe: Recipe, request: PrefillRequest, matched: tuple[Matched, ...], sink: LayerSink | None
) -> PrefillState:
    placement = recipe.place.place(request, matched)
    kv_cache = request.adapter.new_cache(
        request.prompt.tokens, placement.spans, placement.positions, share=not recipe.recompute.writes_reused
    )
    kv_cache.continuation = recipe.attend.continuation(request, matched)
    if sink is not None:
        kv_cache.stream_to(sink)
    return PrefillState(request, kv_cache, matched, recipe.attend)


class NewEntries:
    """The spans whose exact KV a request computes and which are worth storing.

    `hooks` go on the pass. They record the attention of chunks that are kept as versions, if the recipe reads it.
    """

    def __init__(self, recipe: Recipe, state: PrefillState, sink: LayerSink | None = None) -> None:
        self._recipe, self._request = recipe, state.request
        self.spans = [] if sink is not None and sink.bounded else _storable(recipe, state)
        chunks = [number for number in self.spans if self._request.prompt.spans[number].kind == "chunk"]
        recorded = bool(chunks) and recipe.prepare.max_versions is not None
        self._recorder = AttentionRecorder(self._request.prompt, chunks) if recorded else None
        self.hooks: list[AttentionHook] = [self._recorder.hook] if self._recorder is not None else []

    def of(self, kv_cache: FusedCache) -> Iterator[StoreEntry]:
        """Yield each span's KV and, if it was recorded, the feature of its attention; call it after the pass."""
        request, prompt = self._request, self._request.prompt
        limit = self._recipe.prepare.max_versions or MAX_EXACT_VERSIONS
        for number in self.spans:
            span, sources = prompt.spans[number], request.sources(number)
            provenance = request.exact_provenance(number)
            kv = request.adapter.extract_chunk_kv(kv_cache, prompt.token_ids, span.start, span.end)
            yield StoreEntry(kv, provenance, sources, limit if span.kind == "chunk" else None)
            if self._recorder is not None and span.kind == "chunk":
                yield StoreEntry(self._recorder.feature(number), attention_key(provenance), sources)


def _storable(recipe: Recipe, state: PrefillState) -> list[int]:
    """Return the fresh spans whose KV will be exact, because everything before them is exact, fresh or recomputed."""
    request = state.request
    if request.prefix_context is not None or not recipe.attend.causal(request, state.matched):
        return []
    spans = []
    for number, found in enumerate(state.matched):
        if found.origin == "reused" and not request.budget.recomputes_all:
            break  # rows computed after stale ones are not full attention's
        if found.origin == "fresh" and found.span.kind in recipe.match.stored_kinds:
            spans.append(number)
    return spans


def _result(
    recipe: Recipe, state: PrefillState, selected: Tensor, logits: Tensor, new: NewEntries, clock: _Clock
) -> PrefillResult:
    request, kv_cache = state.request, state.kv_cache
    if kv_cache.sink is not None:
        kv_cache.release()
    request.adapter.synchronize()
    timing = clock.timing(kv_cache.place_s)
    budget = request.budget
    plan = Plan(recipe.name, budget.ratio, _plan_spans(state.matched, selected), budget.coverage)
    new_entries = tuple(new.of(kv_cache))
    kv_cache.capture = None  # the entries are copies
    scores = (state.stale, state.scores[-1]) if state.scores else None
    return PrefillResult(logits, plan, timing, kv_cache, selected, new_entries, request, scores)


def _plan_spans(matched: tuple[Matched, ...], selected: Tensor) -> tuple[PlanSpan, ...]:
    spans = []
    for found in matched:
        span = found.span
        inside = int(((selected >= span.start) & (selected < span.end)).sum())
        spans.append(
            PlanSpan(span.kind, span.start, span.end, found.origin, inside, found.reason, span.chunk)
        )
    return tuple(spans)
