"""A method of KV reuse as a recipe of six slots, and the one function that follows it.

Each slot answers one question; most have a default. A new method is a file under `methods/` that fills the
slots it changes, and one line in METHODS. If a method needs an edit here, a slot is wrong.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.core import Plan, PlanSpan, Span, Timing, TokenizedPrompt
from kvweave.errors import StoreError
from kvweave.models.adapter import Adapter
from kvweave.models.canvas import Canvas
from kvweave.recipes.attend import Attend, Causal
from kvweave.recipes.match import Match, MatchSystemThenChunk
from kvweave.recipes.place import Place, TruePositions
from kvweave.recipes.prepare import Isolated, Prepare
from kvweave.recipes.recompute import Recompute, SelectedRows
from kvweave.recipes.request import Budget, Matched, PrefillRequest, PrefillResult, Remembered
from kvweave.recipes.select import Select, SelectNone
from kvweave.store.chunk_store import ChunkStore

_LOG = logging.getLogger(__name__)


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


def run(
    recipe: Recipe,
    adapter: Adapter,
    store: ChunkStore,
    prompt: TokenizedPrompt,
    *,
    ratio: float | None = None,
) -> PrefillResult:
    """Prefill a prompt by a recipe: match → place → select → recompute.

    No stored entry is changed; what was computed and is worth keeping comes back in `remembered`, for the
    caller to store when the answer is out. Raises InvalidRequest for an impossible budget and PromptTooLong.
    """
    adapter.check_length(prompt.tokens)
    began = time.perf_counter()
    budget = Budget(recipe.ratio if ratio is None else ratio)
    request = PrefillRequest(adapter, store, prompt, budget)

    matched = recipe.match.find(request, recipe.prepare)
    matched_at = time.perf_counter()

    canvas = adapter.canvas(prompt.tokens, recipe.place.positions(matched))
    selected = _select(recipe, request, canvas, matched)
    selected_at = time.perf_counter()

    rows = _rows_to_compute(matched, selected)
    kept = _worth_keeping(recipe, request, matched)
    logits = recipe.recompute.run(request, canvas, rows, recipe.attend, capture=bool(kept))
    adapter.synchronize()
    done_at = time.perf_counter()

    timing = Timing(
        match_s=matched_at - began,
        place_s=canvas.place_s,
        select_s=selected_at - matched_at,
        recompute_s=done_at - selected_at - canvas.place_s,
        ttft_s=done_at - began,
        total_s=done_at - began,
    )
    plan = Plan(recipe.name, budget.ratio, _plan_spans(matched, selected))
    remembered = tuple(_remember(request, canvas, number) for number in kept)
    canvas.capture = None  # copied where it is worth keeping
    return PrefillResult(logits, plan, timing, canvas, selected, remembered, request)


def _rows_of(spans: Iterable[Span]) -> Tensor:
    """All prompt positions of some spans, in their order; none for no spans."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in spans)])


def _select(recipe: Recipe, request: PrefillRequest, canvas: Canvas, matched: tuple[Matched, ...]) -> Tensor:
    if request.budget.everything:  # every context row, exact ones too: the result must equal full attention
        return _rows_of(m.span for m in matched if m.span.kind == "chunk" and m.origin != "fresh")
    stale = _rows_of(m.span for m in matched if m.origin == "reused")
    return recipe.select.choose(request, canvas, matched, stale)


def _rows_to_compute(matched: tuple[Matched, ...], selected: Tensor) -> Tensor:
    fresh = _rows_of(m.span for m in matched if m.origin == "fresh")
    return torch.cat([selected, fresh]).sort().values


def _worth_keeping(recipe: Recipe, request: PrefillRequest, matched: tuple[Matched, ...]) -> list[int]:
    """Spans computed in this request whose KV is exact: all before them is exact, fresh or recomputed."""
    if not recipe.attend.causal:
        return []
    kept = []
    for number, found in enumerate(matched):
        if found.origin == "reused" and not request.budget.everything:
            break  # tainted from here on: rows computed behind stale ones are not full attention's
        if found.origin == "fresh" and found.span.kind in recipe.match.remembers:
            kept.append(number)
    return kept


def _remember(request: PrefillRequest, canvas: Canvas, number: int) -> Remembered:
    span = request.prompt.spans[number]
    kv = request.adapter.captured(canvas, request.prompt.token_ids, span.start, span.end)
    return Remembered(kv, request.exact_making(number), request.sources(number))


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
        return sum(
            request.store.put(request.adapter.fingerprint, kept.kv, kept.making, kept.sources)
            for kept in result.remembered
        )
    except (StoreError, OSError) as error:
        _LOG.warning("what this request computed is not kept: %s", error)
        return 0
