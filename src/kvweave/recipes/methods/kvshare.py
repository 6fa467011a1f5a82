"""KVShare: value deviation weighted by how much attention a token gets."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score, TopScores


def kvshare() -> Recipe:
    """As CacheBlend, but a token counts by how much the rows of the prompt attend to it.

    Paper: KVShare (arXiv 2503.16525), as ProphetKV (arXiv 2602.02579) App. C states its score.
    Idea: the harm of a wrong value grows with the attention that it gets.
    Parameters: ratio 0.15.
    Differs from the paper: the attention is that of the first layer, the one computed in full.
    Relations: `cacheblend` without the weight; `prophetkv` uses the question's attention instead of all rows'.
    """
    select = TopScores(AttentionTimesDeviation())
    return Recipe("kvshare", select=select, ratio=0.15)


@dataclass(frozen=True, slots=True)
class AttentionTimesDeviation(Score):
    """(Σ Φ[n, t]) · ‖ΔV(t)‖₁: attention to a token from all rows in the first layer, times its value's distance.

    A window in that layer stays (unlike in `LayerVotes`): it moves with the rows, so it does not favour the context's end.
    """

    supports_coverage: ClassVar[bool] = True

    def scores(self, state: PrefillState) -> Tensor:
        """Run one full layer with all its attention weights, and the second layer's projections."""
        rows = state.not_exact
        probe = AttentionProbe(rows, layers={0})
        deviation = state.compare_second_layer(probe)
        attention = probe.weights[0].cpu() * rows.numel()
        return attention[state.stale] * deviation.values.abs().sum(dim=(0, 2))
