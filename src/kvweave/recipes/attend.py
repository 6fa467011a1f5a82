"""Slot 6, attend: how the computed rows, and the tokens generated after them, attend to reused KV."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.attention import RowPlan
from kvweave.recipes.request import Matched, PrefillRequest


class Attend(Protocol):
    """Turns the rows of a pass into the plan that the attention function goes by."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Whether it is plain causal attention here, so that rows computed with it may count as exact."""
        ...

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """A plan for these ascending prompt positions (T,)."""
        ...

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """What makes a plan for the rows of generated tokens; None where they attend as the model would."""
        ...


@dataclass(frozen=True, slots=True)
class Causal:
    """Every row sees every position up to its own, stale or fresh, with the model's own softmax."""

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """Always."""
        return True

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Blocks of rows, one mask per block for all layers."""
        return request.plan(rows)

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """None: generated tokens are nothing special."""
        return None
