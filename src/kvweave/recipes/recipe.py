"""A method of KV reuse as a recipe of six slots, and the one function that follows it.

Each slot answers one question; most have a default. A new method is a file under `methods/` that fills the
slots it changes, and one line in METHODS. If a method needs an edit here, a slot is wrong.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kvweave.errors import DamagedEntry, InvalidRequest, StoreError
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import with_queries
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionHook
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.fused_cache import FusedCache
from kvweave.recipes.attend import Attend, Causal
from kvweave.recipes.entries import MOST_PATHS, StoreEntry
from kvweave.recipes.match import Match, MatchSystemThenChunk
from kvweave.recipes.place import Place, TruePositions
from kvweave.recipes.prepare import Isolated, Prepare
from kvweave.recipes.recompute import Recompute, SelectedRows
from kvweave.recipes.request import Budget, Matched, PrefillRequest, PrefillResult
from kvweave.recipes.select import Select, SelectNone
from kvweave.recipes.simulated_requests import ChunkAttention, attention_key
from kvweave.recipes.state import PrefillState, rows_of
from kvweave.types import ChunkKV, Plan, PlanSpan, Timing, TokenizedPrompt

_LOG = logging.getLogger(__name__)

Made = TypeVar("Made")


def retry_on_corruption(step: Callable[[], Made]) -> Made:
    """What `step` returns, taken from its beginning again as often as an entry that it uses turns out damaged.

    The step looks up everything that it uses, and what it has done before it fails need not be undone. This ends: no
    damaged entry is found twice, and none that broke off is found again but whole.
    """
    while True:
        try:
            return step()
        except DamagedEntry as error:
            _LOG.warning("starting anew without an entry that cannot be used: %s", error)


def verify_entries(used: Iterable[ChunkKV | None]) -> None:
    """Check all that a step is going to use, where it could not begin again; raises DamagedEntry."""
    for kv in used:
        if kv is not None:
            verify_content(kv)


@contextmanager
def verify_rest_on_corruption(used: Iterable[ChunkKV | None]) -> Iterator[None]:
    """When one of the entries that a step uses turns out damaged, look for damage in all the others as well.

    Damage seldom comes alone: so the next attempt is the last one, not one of as many as there are damaged entries.
    """
    try:
        yield
    except DamagedEntry:
        for kv in used:
            with suppress(DamagedEntry):
                if kv is not None:
                    verify_content(kv)
        raise


@dataclass(frozen=True, slots=True)
class Recipe:
    """Six answers. `ratio` is the budget a request gets when it names none."""

    name: str
    prepare: Prepare = field(default_factory=Isolated)
    match: Match = field(default_factory=MatchSystemThenChunk)
    place: Place = field(default_factory=TruePositions)
    select: Select = field(default_factory=SelectNone)
    recompute: Recompute = field(default_factory=SelectedRows)
    attend: Attend = field(default_factory=Causal)
    ratio: float = 0.0

    def budget(self, ratio: float | None, coverage: float | None) -> Budget:
        """The budget asked for, else the recipe's own; raises InvalidRequest for both at once or an impossible one."""
        if ratio is not None and coverage is not None:
            raise InvalidRequest(f"both ratio {ratio} and coverage {coverage} are given; give one of them")
        if ratio is None and coverage is None:
            return Budget(self.ratio)
        return Budget(ratio or 0.0, coverage)


def run(
    recipe: Recipe,
    adapter: Adapter,
    store: ChunkStore,
    prompt: TokenizedPrompt,
    *,
    ratio: float | None = None,
    coverage: float | None = None,
    lease: Lease | None = None,
    sink: LayerSink | None = None,
    prefix_context: PrefixContext | None = None,
) -> PrefillResult:
    """Prefill a prompt by a recipe: match → place → select → recompute.

    No stored entry is changed; what was computed and is worth keeping comes back in `remembered`, for the
    caller to store when the answer is out. `ratio` or `coverage` is the budget, without them the recipe's own. `lease`
    is what the caller has loaded ahead; nothing that is found is evicted while it lasts, or else until this returns.
    With a `sink` stored KV is placed one layer at a time, recomputed rows attend to it, and the layer is handed over before
    the next is placed; where the taker is bounded, nothing is remembered, since it would be held until the end.
    `prefix_context` is text that the prompt stands behind, and into which the taker then puts it.
    Raises InvalidRequest for an impossible budget and PromptTooLong; and as the taker does.
    """
    adapter.check_length(prompt.tokens + (len(prefix_context.token_ids) if prefix_context is not None else 0))
    began = time.perf_counter()
    budget = recipe.budget(ratio, coverage)
    with store.lease() if lease is None else nullcontext(lease) as held:
        request = PrefillRequest(adapter, store, prompt, budget, held, prefix_context)

        def attempt() -> PrefillResult:
            matched = recipe.match.find(request, recipe.prepare)
            with verify_rest_on_corruption(found.kv for found in matched):
                if prefix_context is not None:  # which could not begin anew in the middle of the pass
                    verify_entries(found.kv for found in matched)
                return _follow(recipe, request, matched, began, sink)

        return retry_on_corruption(attempt)


def _follow(
    recipe: Recipe,
    request: PrefillRequest,
    matched: tuple[Matched, ...],
    began: float,
    sink: LayerSink | None,
) -> PrefillResult:
    """The slots behind match; `began` is when the request came in (`time.perf_counter`)."""
    adapter, prompt, budget = request.adapter, request.prompt, request.budget
    matched_at = time.perf_counter()

    placement = recipe.place.place(request, matched)
    kv_cache = adapter.new_cache(prompt.tokens, placement.spans, placement.positions)
    kv_cache.continuation = recipe.attend.continuation(request, matched)
    if sink is not None:
        kv_cache.hand_over(sink)
    state = PrefillState(request, kv_cache, matched, recipe.attend)
    selected = _select(recipe, state)
    selected_at, placed_s = time.perf_counter(), kv_cache.place_s

    rows = torch.cat([selected, state.fresh]).sort().values
    kept = _worth_keeping(recipe, request, matched) if sink is None or not sink.bounded else []
    noted = _noted(recipe, request, kept)
    hooks: list[AttentionHook] = [noted.hook] if noted is not None else []
    if sink is not None:
        hooks.append(sink)
    logits = recipe.recompute.run(state, rows, hooks, capture=bool(kept))
    if sink is not None:
        kv_cache.let_go()
    adapter.synchronize()
    done_at = time.perf_counter()

    timing = Timing(
        match_s=matched_at - began,
        place_s=kv_cache.place_s,
        select_s=selected_at - matched_at - placed_s,  # a selector that runs the model has stored KV laid out
        recompute_s=done_at - selected_at - (kv_cache.place_s - placed_s),
        ttft_s=done_at - began,
        total_s=done_at - began,
    )
    plan = Plan(recipe.name, budget.ratio, _plan_spans(matched, selected), budget.coverage)
    remembered = tuple(
        each for number in kept for each in _remember(recipe, request, kv_cache, number, noted)
    )
    kv_cache.capture = None  # copied where it is worth keeping
    return PrefillResult(logits, plan, timing, kv_cache, selected, remembered, request)


def _select(recipe: Recipe, state: PrefillState) -> Tensor:
    if state.request.budget.everything:
        # Every context row, exact ones too: the result must equal full attention.
        return rows_of(m.span for m in state.matched if m.span.kind == "chunk" and m.origin != "fresh")
    return recipe.select.choose(state)


def _worth_keeping(recipe: Recipe, request: PrefillRequest, matched: tuple[Matched, ...]) -> list[int]:
    """Spans computed in this request whose KV is exact: all before them is exact, fresh or recomputed."""
    if request.prefix_context is not None or not recipe.attend.causal(request, matched):
        return []
    kept = []
    for number, found in enumerate(matched):
        if found.origin == "reused" and not request.budget.everything:
            break  # tainted from here on: rows computed behind stale ones are not full attention's
        if found.origin == "fresh" and found.span.kind in recipe.match.remembers:
            kept.append(number)
    return kept


def _noted(recipe: Recipe, request: PrefillRequest, kept: list[int]) -> ChunkAttention | None:
    """What notes the attention of the chunks that are kept as versions; None where no recipe would read it."""
    if recipe.prepare.max_versions is None:
        return None
    chunks = [number for number in kept if request.prompt.spans[number].kind == "chunk"]
    return ChunkAttention(request.prompt, chunks) if chunks else None


def _remember(
    recipe: Recipe, request: PrefillRequest, kv_cache: FusedCache, number: int, noted: ChunkAttention | None
) -> Iterator[StoreEntry]:
    """A span's KV, and the note on its attention if it has one."""
    prompt, provenance, sources = request.prompt, request.exact_provenance(number), request.sources(number)
    span = prompt.spans[number]
    kv = request.adapter.captured(kv_cache, prompt.token_ids, span.start, span.end)
    most = recipe.prepare.max_versions or MOST_PATHS
    named = provenance if kv.queries is None else with_queries(provenance)
    yield StoreEntry(kv, named, sources, most if span.kind == "chunk" else None)
    if noted is not None and span.kind == "chunk":
        yield StoreEntry(noted.feature(number), attention_key(provenance), sources)


def _plan_spans(matched: tuple[Matched, ...], selected: Tensor) -> tuple[PlanSpan, ...]:
    spans = []
    for found in matched:
        span = found.span
        inside = int(((selected >= span.start) & (selected < span.end)).sum())
        spans.append(
            PlanSpan(span.kind, span.start, span.end, found.origin, inside, found.reason, span.chunk)
        )
    return tuple(spans)


def remember(result: PrefillResult) -> int:
    """Store what a request computed and is worth keeping; returns how many entries the store took.

    The result is there already: a store that fails is logged and does not take it back.
    """
    request = result.request
    try:
        return sum(kept.put(request.store, request.adapter.fingerprint) for kept in result.remembered)
    except (StoreError, OSError) as error:
        _LOG.warning("what this request computed is not kept: %s", error)
        return 0
