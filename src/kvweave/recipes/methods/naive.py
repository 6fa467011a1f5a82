"""Naive reuse: the lower bound."""

from kvweave.recipes.place import AsStored
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe


def naive() -> Recipe:
    """Chunks prefilled alone and put side by side without moving their positions.

    Paper: CacheClip §2.3 describes the two faults it has, wrong positions and repeated attention sinks.
    Idea: none; it shows what happens when nothing is repaired.
    Parameters: none.
    Differs from the paper: the shared system prefix is exact, as for every recipe. Chunks prepared behind it
        (`--prepare isolated` and others) stay right behind it instead of at the front.
    Relations: `direct` repairs the positions, `reuse` the sinks as well.
    Measured: see the methods page; time in docs/ttft.md.
    """
    return Recipe("naive", prepare=Bare(), place=AsStored())
