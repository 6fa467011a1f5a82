"""APE: chunks side by side after the prefix, attended to in a group of their own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.attention import GroupedPlan, RowPlan
from kvweave.models.fused_cache import PlacedSpan
from kvweave.ops.grouped_attention import ContextGroup
from kvweave.recipes.match import MatchSystemThenChunk
from kvweave.recipes.place import Causal, Placement, TruePositions
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Matched, PrefillRequest


def ape() -> Recipe:
    """Chunks at overlapping positions, attended to by a softmax with a temperature and a scale of its own.

    Paper: APE (arXiv 2502.05431), adaptive parallel encoding.
    Idea: chunks encoded in parallel need no order. Three corrections make attention over them resemble attention over
        a sequence: a shared prefix, a temperature below 1 and a scale below 1.
    Parameters: temperature 0.9, scale 0.9; nothing is recomputed.
    Differs from the paper: if a chunk is not stored, the request is an ordinary one, since a chunk computed in place
        needs a place.
    Relations: `reuse` keeps the order of the chunks and the model's own softmax.
    """
    return Recipe("ape", match=MatchSystemThenChunk(), place=OverlappingPositions(), attend=GroupedContext())


def _applies(request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
    """Return whether all chunks are stored: a chunk computed in the request needs an order and plain attention."""
    chunks = [m for m in matched if m.span.kind == "chunk" and m.span.tokens]
    return bool(chunks) and all(m.kv is not None for m in chunks) and not request.budget.recomputes_all


@dataclass(frozen=True, slots=True)
class OverlappingPositions:
    """Every chunk at the same positions, right after the prefix; the question after the longest of them."""

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Overlap the chunks; use true positions if a chunk is not stored."""
        if not _applies(request, matched):
            return TruePositions().place(request, matched)
        system, *chunks, question = (m.span for m in matched)
        question_start = system.end + max(span.tokens for span in chunks)
        starts = [0, *(system.end for _ in chunks), question_start]
        runs = [
            torch.arange(span.tokens) + start
            for span, start in zip((system, *chunks, question), starts, strict=True)
        ]
        spans = (
            PlacedSpan(m.kv, m.span.start, start)
            for m, start in zip(matched, starts, strict=True)
            if m.kv is not None
        )
        return Placement(tuple(spans), torch.cat(runs))


@dataclass(frozen=True, slots=True)
class GroupedContext:
    """Question and answer attend to the chunks with a sharper softmax, whose mass is then scaled down."""

    temperature: float = 0.9
    scale: float = 0.9

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Return True if a chunk is not stored, or everything is recomputed."""
        return not _applies(request, matched)

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return a grouped plan if every chunk is stored, else a causal one."""
        if self.causal(request, matched):
            return Causal().plan(request, matched, rows)
        chunks = [m.span for m in matched if m.span.kind == "chunk"]
        group = ContextGroup(chunks[0].start, chunks[-1].end, self.temperature, self.scale)
        geometry = request.adapter.geometry
        return GroupedPlan(rows.to(geometry.device), geometry.dtype, group)

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        if self.causal(request, matched):
            return None
        return lambda rows: self.plan(request, matched, rows)
