"""A prompt with its stored KV in place and nothing recomputed yet: what the last three slots work on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import AttentionHook, RowPlan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.updates import StopForward, Update
from kvweave.recipes.attend import Attend
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.types import Span

CHECKED = 1  # the second layer: the first one's K,V depend on nothing but the tokens


@dataclass(frozen=True)
class SecondLayer:
    """What a layer was about to replace, and where the stale tokens' n rows stand in it.

    `keys` and `values` (G, n, D), float32 and on the CPU, are new minus stale, keys rotated; made when they are asked for.
    """

    update: Update
    places: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """Distance of the keys."""
        return self._off(self.update.keys, self.update.stale_keys)

    @cached_property
    def values(self) -> Tensor:
        """Distance of the values."""
        return self._off(self.update.values, self.update.stale_values)

    def _off(self, new: Tensor, stale: Tensor) -> Tensor:
        return (new[:, self.places].float() - stale[:, self.places].float()).cpu()


class _Compare:
    """Watches updates until the checked layer, and ends the pass there."""

    def __init__(self) -> None:
        self.seen: Update | None = None

    def see(self, update: Update) -> None:
        if update.layer == CHECKED:
            self.seen = update
            raise StopForward


def second_layer(state: "PrefillState", *hooks: AttentionHook) -> SecondLayer:
    """Compute all stale and fresh rows through the first layer, in a pass that the watches see.

    The canvas keeps its stale KV from the second layer on. Raises InvalidRequest for a model of one layer.
    """
    adapter = state.request.adapter
    if adapter.geometry.layers <= CHECKED:
        raise InvalidRequest(
            f"{adapter.fingerprint.name} has one layer; this recipe compares the second. Take another recipe"
        )
    rows, compare = first_layer_rows(state), _Compare()
    adapter.look(state.kv_cache, state.request.prompt.token_ids, state.plan(rows, *hooks), compare)
    assert compare.seen is not None
    places = torch.searchsorted(rows, state.stale).to(compare.seen.values.device)
    return SecondLayer(compare.seen, places)


def first_layer_rows(state: "PrefillState") -> Tensor:
    """The prompt positions that the first layer computes to compare the second: all that are stale or fresh."""
    return torch.cat([state.stale, state.fresh]).sort().values


@dataclass(frozen=True)
class PrefillState:
    """The placed prompt. Rows are prompt positions, ascending, on the CPU.

    A pass over some rows leaves their K,V in the canvas, which belongs to this request; whoever looks before the
    recomputation may run the question, since the recomputation runs it again.
    """

    request: PrefillRequest
    kv_cache: FusedCache
    matched: tuple[Matched, ...]
    attend: Attend

    @cached_property
    def stale(self) -> Tensor:
        """(n,): rows whose stored KV was made in another context; only these may be selected."""
        return rows_of(m.span for m in self.matched if m.origin == "reused")

    @cached_property
    def fresh(self) -> Tensor:
        """Rows without stored KV, the question's among them; every pass has to compute them."""
        return rows_of(m.span for m in self.matched if m.origin == "fresh")

    @cached_property
    def asked(self) -> Tensor:
        """The rows that the user wrote; all of the question's where that is none."""
        start, end = self.request.prompt.user_rows
        question = self.request.prompt.spans[-1]
        return torch.arange(start, end) if end > start else torch.arange(question.start, question.end)

    @cached_property
    def context(self) -> tuple[int, int]:
        """First position of the first chunk, and the end of the last one; (0, 0) without chunks."""
        chunks = [m.span for m in self.matched if m.span.kind == "chunk"]
        return (chunks[0].start, chunks[-1].end) if chunks else (0, 0)

    @cached_property
    def second_layer(self) -> SecondLayer:
        """How far stale KV is off there; whoever asks first pays for it."""
        return second_layer(self)

    def plan(self, rows: Tensor, *hooks: AttentionHook) -> RowPlan:
        """How these rows attend, with watches on them."""
        plan = self.attend.plan(self.request, self.matched, rows)
        plan.hooks.extend(hooks)
        return plan

    def run(self, rows: Tensor, *hooks: AttentionHook, capture: bool = False) -> Tensor:
        """Compute rows through all layers; logits (1, vocab) of the last."""
        ids = self.request.prompt.token_ids
        return self.request.adapter.compute(self.kv_cache, ids, self.plan(rows, *hooks), capture=capture)

    def look(self, rows: Tensor, *hooks: AttentionHook) -> None:
        """Compute rows as far as the watches want to see them: one that raises StopForward ends the pass."""
        self.request.adapter.look(self.kv_cache, self.request.prompt.token_ids, self.plan(rows, *hooks))


def rows_of(spans: Iterable[Span]) -> Tensor:
    """All prompt positions of some spans, in their order; none for no spans."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in spans)])
