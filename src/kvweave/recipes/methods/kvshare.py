"""KVShare: value deviation weighed by how much attention a token gets."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState, first_layer_rows, second_layer


@dataclass(frozen=True, slots=True)
class AttendedDeviation:
    """(Σ Φ[n, t]) · ‖ΔV(t)‖₁: attention that a token gets from all rows in the first layer, times its value's distance."""

    adds_up: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """One layer in full with all its attention weights, and the second one's projections."""
        rows = first_layer_rows(state)
        inflow = AttentionProbe(rows, layers={0})
        found = second_layer(state, inflow)
        gets = inflow.weights[0].cpu() * rows.numel()
        return gets[state.stale] * found.values.abs().sum(dim=(0, 2))


def kvshare() -> Recipe:
    """As CacheBlend, but a token counts by how much the rows of the prompt attend to it.

    Paper: KVShare, as ProphetKV App. C states its score.
    Idea: a wrong value harms by the attention that it gets.
    Parameters: ratio 0.15.
    Differs from the paper: attention is that of the layer that was computed in full, the first.
    Relations: `cacheblend` without the weight; `prophetkv` takes the question's attention instead of everyone's.
    Measured: see the methods page.
    """
    return Recipe("kvshare", match=MatchPathThenChunk(), select=Highest(AttendedDeviation()), ratio=0.15)
