"""Slot 6, attend: how the computed rows attend to reused KV."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowPlan
from kvweave.recipes.request import PrefillRequest


class Attend(Protocol):
    """Turns the rows of a pass into the plan that the attention function goes by."""

    @property
    def causal(self) -> bool:
        """Whether it is plain causal attention, so that rows computed with it may count as exact."""
        ...

    def plan(self, request: PrefillRequest, rows: Tensor) -> RowPlan:
        """A plan for these ascending prompt positions (T,)."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Every row sees every position up to its own, stale or fresh, with the model's own softmax."""

    causal: bool = True

    def plan(self, request: PrefillRequest, rows: Tensor) -> RowPlan:
        """Blocks of rows, one mask per block for all layers."""
        return request.adapter.rows(rows)
