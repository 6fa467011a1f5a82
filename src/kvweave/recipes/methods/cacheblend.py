"""CacheBlend: recompute the tokens whose values in the second layer are furthest from the stored ones."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score, TopScores


def cacheblend() -> Recipe:
    """Compute the first layer in full, compare the second layer's values with the stale ones, recompute where they differ.

    Paper: CacheBlend (arXiv 2405.16444); ProphetKV (arXiv 2602.02579) App. C states its score.
    Idea: tokens whose KV is far off in one layer are far off in the next ones too.
    Parameters: ratio 0.15.
    Differs from the paper: the selected rows run through the first layer a second time, which changes nothing but
        costs one layer for these rows.
    Relations: ignores the question, unlike `prophetkv` and `fusionrag`; `kvshare` weighs the same distance by attention.
        Also works on chunks prepared alone (`--prepare bare`). `cacheblend-kv` compares keys too.
    """
    return Recipe("cacheblend", select=TopScores(ValueDeviation()), ratio=0.15)


@dataclass(frozen=True, slots=True)
class ValueDeviation(Score):
    """Squared distance of each token's stale value from the one computed with a full first layer."""

    supports_coverage: ClassVar[bool] = True

    def scores(self, state: PrefillState) -> Tensor:
        """Run one full layer and the second layer's projections."""
        return state.second_layer.values.square().sum(dim=(0, 2))
