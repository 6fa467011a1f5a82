"""An attend slot that lets others look on while a recipe runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvweave.models.attention import AttentionHook, RowPlan
from kvweave.recipes.attend import Attend
from kvweave.recipes.request import Matched, PrefillRequest


@dataclass(frozen=True, slots=True)
class Watched:
    """A recipe's attend slot with watches on its rows; changes nothing else."""

    inner: Attend
    hooks: Sequence[AttentionHook]

    def causal(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> bool:
        """As the inner slot's."""
        return self.inner.causal(request, matched)

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """The inner slot's plan, watched."""
        plan = self.inner.plan(request, matched, rows)
        plan.hooks.extend(self.hooks)
        return plan

    def continuation(
        self, request: PrefillRequest, matched: tuple[Matched, ...]
    ) -> Callable[[Tensor], RowPlan] | None:
        """The inner slot's, unwatched."""
        return self.inner.continuation(request, matched)
