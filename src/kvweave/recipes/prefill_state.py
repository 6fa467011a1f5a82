"""The state of a prompt whose stored KV is placed and of which nothing is recomputed yet: what selectors read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import RowPlan
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.models.hooks import AttentionHook, LayerQueries, StopForward
from kvweave.recipes.place import Attend
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.types import Span

SECOND_LAYER = 1  # the first layer with stale KV: K,V of layer 0 depend on the tokens alone


def rows_of(spans: Iterable[Span]) -> Tensor:
    """Return all prompt positions of some spans, in their order."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in spans)])


@dataclass(frozen=True)
class PrefillState:
    """The placed prompt of one request.

    All rows are prompt positions, ascending, on the CPU. A pass over rows writes their K,V to `kv_cache`, which belongs
    to this request. A selector may run the question's rows, since the recomputation runs them again. One that ranks the
    stale rows by scores (n,) puts these into `scores`, for who asks why, and the rows that it takes whatever their scores, evenly
    spaced, into `spaced`.
    """

    request: PrefillRequest
    kv_cache: FusedCache
    matched: tuple[Matched, ...]
    attend: Attend
    scores: list[Tensor] = field(default_factory=list)
    spaced: list[Tensor] = field(default_factory=list)

    @cached_property
    def stale(self) -> Tensor:
        """(n,): rows whose stored KV was computed in another context; only these may be selected."""
        return rows_of(m.span for m in self.matched if m.origin == "reused")

    @cached_property
    def fresh(self) -> Tensor:
        """Rows without stored KV, the question's among them; every pass has to compute them."""
        return rows_of(m.span for m in self.matched if m.origin == "fresh")

    @cached_property
    def stored_chunks(self) -> Tensor:
        """Rows of all chunks with stored KV, stale or exact."""
        return rows_of(m.span for m in self.matched if m.span.kind == "chunk" and m.origin != "fresh")

    @cached_property
    def not_exact(self) -> Tensor:
        """All stale and fresh rows."""
        return torch.cat([self.stale, self.fresh]).sort().values

    @cached_property
    def question_rows(self) -> Tensor:
        """The rows that the user wrote; the whole question span if the user wrote nothing."""
        start, end = self.request.prompt.user_rows
        question = self.request.prompt.spans[-1]
        return torch.arange(start, end) if end > start else torch.arange(question.start, question.end)

    @cached_property
    def context(self) -> tuple[int, int]:
        """First position of the first chunk and the end of the last one; (0, 0) without chunks."""
        chunks = [m.span for m in self.matched if m.span.kind == "chunk"]
        return (chunks[0].start, chunks[-1].end) if chunks else (0, 0)

    def cache_within_window(self, window: int) -> FusedCache:
        """Return another cache of this prompt's stored KV, in which no token is further than half a window from the question.

        Tokens further away, counted from the last row that the user wrote, are all rotated to that distance. So a layer whose
        window is lifted attends at distances that it was trained on (a distance ceiling, as in LM-Infinite, arXiv
        2308.16137). Half a window and not a whole one, since layers attend little to the far edge of their window. The keys
        of nearer tokens are those of `kv_cache`.
        """
        edge = min(int(self.question_rows[-1]) - window // 2, int(self.question_rows[0]))
        first = self.request.first_position
        spans = [
            PlacedSpan(m.kv, m.span.start, first, torch.arange(m.span.start, m.span.end).clamp(min=edge))
            for m in self.matched
            if m.kv is not None
        ]
        positions = first + torch.arange(self.request.prompt.tokens)
        return self.request.adapter.new_cache(self.request.prompt.tokens, spans, positions)

    @cached_property
    def second_layer(self) -> "LayerDeviation":
        """The deviation of stale KV in the second layer; the first access runs a pass for it."""
        return self.compare_second_layer()

    def plan(self, rows: Tensor, *hooks: AttentionHook) -> RowPlan:
        """Return how these rows attend, with hooks on the pass."""
        plan = self.attend.plan(self.request, self.matched, rows)
        plan.hooks.extend(hooks)
        return plan

    def compare_second_layer(self, *hooks: AttentionHook) -> "LayerDeviation":
        """Compute all stale and fresh rows through the first layer, with hooks on the pass, and compare the second.

        The KV cache gets its stale KV of the second layer back. Raises InvalidRequest for a model of one layer.
        """
        adapter, rows = self.request.adapter, self.not_exact
        if adapter.geometry.layers <= SECOND_LAYER:
            raise InvalidRequest(
                f"{adapter.fingerprint.name} has one layer; this recipe compares the second. Take another recipe"
            )
        shape = adapter.geometry
        like = torch.empty(1, shape.kv_heads, 0, shape.head_width, dtype=shape.dtype, device=shape.device)
        stale = self.stale.to(shape.device)
        before = [each[:, :, stale] for each in self.kv_cache.layer_kv(SECOND_LAYER, like)]
        second = _SecondLayer(stale)
        adapter.run_partial(self.kv_cache, self.request.prompt.token_ids, self.plan(rows, *hooks, second))
        if self.kv_cache.sink is None:  # else nothing of the pass is left
            with self.kv_cache.writing(stale):
                self.kv_cache.update(*before, SECOND_LAYER)
        return LayerDeviation(*second.found, *before)


@dataclass(frozen=True)
class LayerDeviation:
    """How far stale KV is from newly computed KV in one layer, given both of the stale rows, (1, G, n, D), keys rotated."""

    new_keys: Tensor
    new_values: Tensor
    stale_keys: Tensor
    stale_values: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """New minus stale keys (G, n, D), float32, on the CPU."""
        return (self.new_keys.float() - self.stale_keys.float())[0].cpu()

    @cached_property
    def values(self) -> Tensor:
        """New minus stale values (G, n, D), float32, on the CPU."""
        return (self.new_values.float() - self.stale_values.float())[0].cpu()


class _SecondLayer:
    """Keeps keys and values of these rows in the second layer, and ends the pass there."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self.found: list[Tensor] = []

    def on_layer(self, queries: LayerQueries) -> None:
        if queries.layer == SECOND_LAYER:
            self.found = [each[:, :, self._rows] for each in (queries.keys, queries.values)]
            raise StopForward
