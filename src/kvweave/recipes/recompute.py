"""Slot 5, recompute: how the selected and fresh rows are run through the model."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.canvas import Canvas
from kvweave.recipes.attend import Attend
from kvweave.recipes.request import PrefillRequest


class Recompute(Protocol):
    """Runs rows and leaves their K,V in the canvas."""

    def run(
        self, request: PrefillRequest, canvas: Canvas, rows: Tensor, attend: Attend, *, capture: bool
    ) -> Tensor:
        """Compute prompt positions `rows` (T,), ascending, the last one included; logits (1, vocab) of the last."""
        ...


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """All rows through all layers in one pass: Recompute(T) of the methods page (FusionRAG §3.2, ProphetKV §4.3)."""

    def run(
        self, request: PrefillRequest, canvas: Canvas, rows: Tensor, attend: Attend, *, capture: bool
    ) -> Tensor:
        """One pass."""
        plan = attend.plan(request, rows)
        return request.adapter.compute(canvas, request.prompt.token_ids, plan, capture=capture)
