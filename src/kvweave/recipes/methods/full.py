"""Full attention: the reference."""

from kvweave.recipes.match import MatchNothing
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe


def full() -> Recipe:
    """Ordinary prefill of the whole prompt.

    Paper: none; every paper's baseline.
    Idea: compute every row. The reference for quality and the denominator of every speed-up.
    Parameters: none; a ratio changes nothing.
    Differs from the paper: nothing to differ from.
    Relations: every recipe equals it at ratio 1.
    Measured: see the methods page; time in docs/ttft.md.
    """
    return Recipe("full", prepare=NotPrepared(), match=MatchNothing(), ratio=1.0)
