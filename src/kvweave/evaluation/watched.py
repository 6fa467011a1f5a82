"""An attend slot that lets others look on while a recipe runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvweave.models.attention import RowPlan, RowWatch
from kvweave.recipes.attend import Attend
from kvweave.recipes.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class Watched:
    """A recipe's attend slot with watches on its rows; changes nothing else."""

    inner: Attend
    watches: Sequence[RowWatch]

    @property
    def causal(self) -> bool:
        """As the inner slot's."""
        return self.inner.causal

    def plan(self, request: PrefillRequest, rows: Tensor) -> RowPlan:
        """The inner slot's plan, watched."""
        plan = self.inner.plan(request, rows)
        plan.watches.extend(self.watches)
        return plan
