"""Lower bounds that every method has to beat: positions left wrong, and tokens drawn at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.place import AsStored
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState


def naive() -> Recipe:
    """Chunks prefilled alone and put side by side without moving their positions.

    Paper: CacheClip §2.3 describes the two faults it has, wrong positions and repeated attention sinks.
    Idea: none; it shows what happens when nothing is repaired.
    Parameters: none.
    Differs from the paper: the shared system prefix is exact, as for every recipe. Chunks prepared behind it
        (`--prepare isolated` and others) stay right behind it instead of at the front.
    Relations: `direct` repairs the positions, `reuse` the sinks as well.
    Measured: see the methods page; time in lab/docs/ttft.md.
    """
    return Recipe("naive", prepare=Bare(), place=AsStored())


@dataclass(frozen=True, slots=True)
class RandomScore:
    """Uniform scores, drawn from the prompt's own tokens: the same prompt always selects the same rows."""

    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """No pass."""
        seed = hash(state.request.prompt.token_ids) & 0x7FFFFFFF  # of integers: the same in every process
        return torch.rand(state.stale.numel(), generator=torch.Generator().manual_seed(seed))


def random() -> Recipe:
    """Recompute tokens drawn at random.

    Paper: none; the baseline that a selector has to beat.
    Idea: recomputing anything helps a little, since recomputed rows see the whole prompt.
    Parameters: ratio 0.15.
    Differs from the paper: nothing to differ from.
    Relations: every selective recipe at the same ratio.
    Measured: see the methods page.
    """
    return Recipe("random", match=MatchPathThenChunk(), select=Highest(RandomScore()), ratio=0.15)
