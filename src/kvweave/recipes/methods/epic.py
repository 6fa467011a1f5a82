"""EPIC: the first tokens of every chunk."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.assembled import Assembled
from kvweave.recipes.chunk_features import Record
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest


@dataclass(frozen=True, slots=True)
class NearTheStart:
    """A token scores the higher the nearer it stands to the start of its chunk; chunks share a budget evenly."""

    adds_up: ClassVar[bool] = False
    records: ClassVar[tuple[Record, ...]] = ()

    def scores(self, scene: Assembled) -> Tensor:
        """Known before the question; no pass."""
        offsets = [torch.arange(m.span.tokens) for m in scene.matched if m.origin == "reused"]
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
    select = Highest(NearTheStart())
    return Recipe("epic", prepare=Bare(), match=MatchPathThenChunk(), select=select, ratio=0.15)
