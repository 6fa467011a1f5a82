"""A prompt with its stored KV in place and nothing recomputed yet: what the last three slots work on."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvweave.core import Span
from kvweave.models.attention import RowPlan, RowWatch
from kvweave.models.canvas import Canvas
from kvweave.recipes.attend import Attend
from kvweave.recipes.deviation import SecondLayer, second_layer
from kvweave.recipes.request import Matched, PrefillRequest


@dataclass(frozen=True)
class Assembled:
    """The placed prompt. Rows are prompt positions, ascending, on the CPU.

    A pass over some rows leaves their K,V in the canvas, which belongs to this request; whoever looks before the
    recomputation may run the question, since the recomputation runs it again.
    """

    request: PrefillRequest
    canvas: Canvas
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

    def plan(self, rows: Tensor, *watches: RowWatch) -> RowPlan:
        """How these rows attend, with watches on them."""
        plan = self.attend.plan(self.request, self.matched, rows)
        plan.watches.extend(watches)
        return plan

    def run(self, rows: Tensor, *watches: RowWatch, capture: bool = False) -> Tensor:
        """Compute rows through all layers; logits (1, vocab) of the last."""
        ids = self.request.prompt.token_ids
        return self.request.adapter.compute(self.canvas, ids, self.plan(rows, *watches), capture=capture)

    def look(self, rows: Tensor, *watches: RowWatch) -> None:
        """Compute rows as far as the watches want to see them: one that raises PassOver ends the pass."""
        self.request.adapter.look(self.canvas, self.request.prompt.token_ids, self.plan(rows, *watches))


def rows_of(spans: Iterable[Span]) -> Tensor:
    """All prompt positions of some spans, in their order; none for no spans."""
    return torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(s.start, s.end) for s in spans)])
