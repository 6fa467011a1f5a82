"""Random selection: what a budget is worth without any idea where to spend it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.assembled import Assembled
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.record import Record
from kvweave.recipes.select import Highest


@dataclass(frozen=True, slots=True)
class Lottery:
    """Uniform scores, drawn from the prompt's own tokens: the same prompt always selects the same rows."""

    adds_up: ClassVar[bool] = False
    records: ClassVar[tuple[Record, ...]] = ()

    def scores(self, scene: Assembled) -> Tensor:
        """No pass."""
        seed = hash(scene.request.prompt.token_ids) & 0x7FFFFFFF  # of integers: the same in every process
        return torch.rand(scene.stale.numel(), generator=torch.Generator().manual_seed(seed))


def random() -> Recipe:
    """Recompute tokens drawn at random.

    Paper: none; the baseline that a selector has to beat.
    Idea: recomputing anything helps a little, since recomputed rows see the whole prompt.
    Parameters: ratio 0.15.
    Differs from the paper: nothing to differ from.
    Relations: every selective recipe at the same ratio.
    Measured: see the methods page.
    """
    return Recipe("random", match=MatchPathThenChunk(), select=Highest(Lottery()), ratio=0.15)
