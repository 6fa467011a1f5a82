"""Slot 3, place: at which positions the stored keys are rotated in."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.request import Matched, PrefillRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """Where stored spans are rotated to, and rotary positions (N,) of all prompt tokens where they are not 0 … N − 1."""

    spans: tuple[PlacedSpan, ...]
    positions: Tensor | None = None


class Place(Protocol):
    """Decides rotary positions; the order of the spans in the prompt never changes."""

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """A place for everything that has stored KV."""
        ...


@dataclass(frozen=True, slots=True)
class TruePositions:
    """Each token at its index in the text: what full attention would use (FusionRAG eq. 6)."""

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Rotated to where the span stands."""
        first = request.first_position
        return Placement(
            tuple(PlacedSpan(m.kv, m.span.start, first + m.span.start) for m in matched if m.kv is not None),
            None
            if request.prefix_context is None
            else request.prefix_context.positions(request.prompt.tokens),
        )


@dataclass(frozen=True, slots=True)
class AsStored:
    """Each chunk where it stood when it was prepared, whatever stands there in the prompt: wrong, the lower bound.

    That is the front for one that was prefilled alone, and right behind the system prefix for all others: entries do
    not say how long the neighbours were that some were prepared behind.
    """

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Rotated to where the span stood; exact ones are where they belong."""
        true = TruePositions().place(request, matched)
        stored = [
            span
            if m.origin == "exact"
            else replace(span, rope_start=len(request.prefix) if m.provenance and m.provenance.context else 0)
            for m, span in zip((m for m in matched if m.kv is not None), true.spans, strict=True)
        ]
        return replace(true, spans=tuple(stored))
