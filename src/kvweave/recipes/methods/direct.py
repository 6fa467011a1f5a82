"""Direct reuse: bare chunks at their true positions."""

from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe


def direct() -> Recipe:
    """Chunks prefilled alone, moved to where they stand in the prompt.

    Paper: CacheClip §4.1 ("direct reuse"), ProphetKV's NaiveReuse.
    Idea: rotary positions are relative, so stored keys can be rotated to any place.
    Parameters: none.
    Differs from the paper: keys are stored before rotation, so moving them is exact to the bit.
    Relations: `reuse` prefills behind the system prefix and so loses the sink at every chunk's start.
    Measured: see the methods page; time in docs/ttft.md.
    """
    return Recipe("direct", prepare=Bare())
