"""EPIC: the first tokens of every chunk."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState


@dataclass(frozen=True, slots=True)
class PositionScore:
    """A token scores the higher the nearer it stands to the start of its chunk; chunks share a budget evenly."""

    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Known before the question; no pass."""
        offsets = [torch.arange(m.span.tokens) for m in state.matched if m.origin == "reused"]
        return -torch.cat(offsets).float()


def epic() -> Recipe:
    """Recompute the first tokens of every chunk, the same number of each.

    Paper: EPIC (LegoLink).
    Idea: a chunk prefilled alone takes its first tokens for the start of the text and rests its attention on them;
        recomputed in place they stop being a sink, and little else is wrong.
    Parameters: ratio 0.15.
    Differs from the paper: the budget is a share of the stale tokens instead of a fixed number per chunk.
    Relations: repairs what `direct` suffers from; chunks prepared behind the system prefix have no such sinks, so
        it has less to repair on `isolated` (`--prepare isolated --select epic`).
    Measured: see the methods page.
    """
    select = Highest(PositionScore())
    return Recipe("epic", prepare=Bare(), match=MatchPathThenChunk(), select=select, ratio=0.15)
