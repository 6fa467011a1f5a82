"""Slot 4, select: which stale tokens are computed again."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.canvas import Canvas
from kvweave.recipes.request import Matched, PrefillRequest


class Select(Protocol):
    """Chooses rows within the budget, from stale rows only.

    Attributes:
        selects: whether ratios between 0 and 1 mean anything to it.
    """

    selects: ClassVar[bool]

    def choose(
        self, request: PrefillRequest, canvas: Canvas, matched: tuple[Matched, ...], stale: Tensor
    ) -> Tensor:
        """Prompt positions to recompute: ascending, a subset of `stale` (n,), at most `budget.rows(n)` of them.

        Raises InvalidRequest for a budget that the selector cannot spend.
        """
        ...


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Nothing is recomputed; where something is stale, a ratio between 0 and 1 has no meaning and is refused."""

    selects: ClassVar[bool] = False

    def choose(
        self, request: PrefillRequest, canvas: Canvas, matched: tuple[Matched, ...], stale: Tensor
    ) -> Tensor:
        """No rows."""
        if request.budget.rows(stale.numel()):
            raise InvalidRequest(
                f"ratio is {request.budget.ratio}, but this recipe recomputes nothing; use 0, or 1 to compute everything"
            )
        return torch.empty(0, dtype=torch.long)
