"""Slots 3 and 6: at which rotary positions stored keys are placed, and how rows attend to reused KV."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowPlan
from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.request import Matched, PrefillRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """The placed spans, and the rotary positions (N,) of all prompt tokens; None if these are 0 … N − 1."""

    spans: tuple[PlacedSpan, ...]
    positions: Tensor | None = None


class Place(Protocol):
    """Chooses rotary positions; the order of the spans in the prompt never changes."""

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Return a place for every span with stored KV."""


@dataclass(frozen=True, slots=True)
class TruePositions:
    """Each token at its index in the text, as full attention would have it (FusionRAG eq. 6)."""

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Rotate each span to its position in the prompt."""
        first, prefix_context = request.first_position, request.prefix_context
        return Placement(
            tuple(PlacedSpan(m.kv, m.span.start, first + m.span.start) for m in matched if m.kv is not None),
            None if prefix_context is None else prefix_context.positions(request.prompt.tokens),
        )


class Attend(Protocol):
    """Makes the plan by which computed rows, and the tokens generated after them, attend to reused KV."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Return whether this request uses plain causal attention, so that computed rows can be exact."""

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return a plan for these prompt positions (T,), ascending."""

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """Return a function from rows of generated tokens to their plan; None if they attend as the model would."""


@dataclass(frozen=True, slots=True)
class Causal:
    """Every row attends to all positions up to its own, stale or fresh, with the model's own softmax."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        return True

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return the request's plain plan: blocks of rows, one mask per block for all layers."""
        return request.plan(rows)

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        return None
