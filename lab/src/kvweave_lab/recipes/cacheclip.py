"""CacheClip with the selection fixed before windows drop from it, which spends a part of its budget."""

from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.methods.cacheclip import AuxiliaryWindows
from kvweave.recipes.recipe import Recipe


def windows(auxiliary: str | None = None) -> Recipe:
    """CacheClip that selects the budget's share of tokens once, and drops those that windows do not keep.

    Paper: CacheClip (arXiv 2510.10129) §3.3, read literally.
    Idea: tokens without selected neighbours are not worth recomputing.
    Parameters: as `cacheclip`.
    Differs from the paper: the selection is cut to the budget after mapping.
    Relations: `cacheclip` selects on until the budget is spent; at small ratios this recipe recomputes next to nothing.
    """
    select = AuxiliaryWindows(auxiliary, refill=False)
    return Recipe("cacheclip-windows", match=MatchPathThenChunk(), select=select, ratio=0.2)
