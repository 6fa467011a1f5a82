"""Slot 3, place: at which positions the stored keys are rotated in."""

from dataclasses import dataclass
from typing import Protocol

from kvweave.models.canvas import PlacedSpan
from kvweave.recipes.request import Matched


class Place(Protocol):
    """Decides the rotary positions of stored spans; their order in the prompt never changes."""

    def positions(self, matched: tuple[Matched, ...]) -> tuple[PlacedSpan, ...]:
        """Placed spans for everything that has stored KV."""
        ...


@dataclass(frozen=True, slots=True)
class TruePositions:
    """Each token at its index in the prompt: what full attention would use (FusionRAG eq. 6)."""

    def positions(self, matched: tuple[Matched, ...]) -> tuple[PlacedSpan, ...]:
        """Rotated to where the span stands."""
        return tuple(PlacedSpan(m.kv, m.span.start, m.span.start) for m in matched if m.kv is not None)


@dataclass(frozen=True, slots=True)
class AsStored:
    """Each token at the position it had when it was prepared: wrong, kept as the lower bound."""

    def positions(self, matched: tuple[Matched, ...]) -> tuple[PlacedSpan, ...]:
        """Rotated to where the span stood when it was made."""
        return tuple(PlacedSpan(m.kv, m.span.start, m.made_at) for m in matched if m.kv is not None)
