"""EPIC: recompute the first tokens of every chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score, TopScores


def epic() -> Recipe:
    """Recompute the first tokens of every chunk, the same number of each.

    Paper: EPIC (arXiv 2410.15332), LegoLink.
    Idea: a chunk prefilled alone takes its first tokens for the start of the text and makes them an attention sink.
        Recomputed in place they stop being one, and little else is wrong.
    Parameters: ratio 0.15.
    Differs from the paper: the budget is a share of the stale tokens instead of a fixed number per chunk.
    Relations: repairs the weakness of chunks prepared alone (`bare+reuse`). Chunks prepared after the system prefix have no such sinks, so it has less to
        repair on them (`isolated+epic`).
    """
    select = TopScores(PositionScore())
    return Recipe("epic", prepare=Bare(), select=select, ratio=0.15)


@dataclass(frozen=True, slots=True)
class PositionScore(Score):
    """Tokens nearer to the start of their chunk score higher; all chunks get the same share of the budget."""

    def scores(self, state: PrefillState) -> Tensor:
        """Return the negative offset in the chunk; runs no pass."""
        offsets = [torch.arange(m.span.tokens) for m in state.matched if m.origin == "reused"]
        return -torch.cat(offsets).float()
