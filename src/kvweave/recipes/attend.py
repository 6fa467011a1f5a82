"""Slot 6, attend: how the computed rows, and the tokens generated after them, attend to reused KV."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowPlan
from kvweave.recipes.request import Matched, PrefillRequest


class Attend(Protocol):
    """Makes the plan that the attention function follows."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Return whether this request uses plain causal attention, so that computed rows can be exact."""
        ...

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return a plan for these prompt positions (T,), ascending."""
        ...

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """Return a function from rows of generated tokens to their plan; None if they attend as the model would."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Every row attends to all positions up to its own, stale or fresh, with the model's own softmax."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Return True."""
        return True

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return the request's plain plan: blocks of rows, one mask per block for all layers."""
        return request.plan(rows)

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """Return None."""
        return None
