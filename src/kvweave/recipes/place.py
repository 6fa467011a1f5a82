"""Slot 3, place: at which rotary positions stored keys are placed."""

from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class StoredPositions:
    """Each chunk at the position where it was prepared, which is wrong in most prompts: a lower bound.

    That is position 0 for a chunk that was prefilled alone. All others start right after the system prefix, because
    entries do not record the length of the neighbours that a chunk was prepared after.
    """

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Leave each reused span unmoved; exact spans are at their true positions already."""
        true = TruePositions().place(request, matched)
        stored = [
            span
            if m.origin == "exact"
            else replace(span, rope_start=len(request.prefix) if m.provenance and m.provenance.context else 0)
            for m, span in zip((m for m in matched if m.kv is not None), true.spans, strict=True)
        ]
        return replace(true, spans=tuple(stored))
