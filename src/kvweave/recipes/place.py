"""Slot 3, place: at which rotary positions stored keys are placed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
        ...


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
