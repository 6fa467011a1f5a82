"""Settle the refined reference model: `python -m training.settle FOLDER`. Interrupted, the same command goes on.

Goes on from what `training.refine` left in the folder `refined` beside, on names that end alike and on values put together
of any tokens: a name is to be told by all of it, and a value copied whatever it is. Hints say whose a thing is, until the
last cycle lets go of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from training.plan import Stage
from training.refine import SHORT, RefiningTrainer
from training.train import main

_SHAPE = replace(
    SHORT,
    sparse=0.5,
    spliced=0.3,
    reworded=0.25,
    stepwise=2.0,
    varied=0.3,
    garbled=0.03,
    joined=0.3,
    alike=0.6,
    owned=True,
)

CYCLES = (
    Stage(1200, _SHAPE, 6, 0.04, 8e-4, 0.2, 0.4, 0.5),
    Stage(900, replace(_SHAPE, alike=0.4), 6, 0.04, 8e-4, 0.1, 0.2, 0.5),
    Stage(900, replace(_SHAPE, alike=0.3), 6, 0.04, 6e-4, 0.1, 0.2, 0.5),
    Stage(1300, replace(_SHAPE, alike=0.3, owned=False), 6, 0.04, 8e-4, 0.1, 0.2, 0.6),
)


class SettlingTrainer(RefiningTrainer):
    """Further cycles; what is exported is the mean of the start and of the ends of the last two."""

    averaged = 2
    after = "refined"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """The cycles before they are scaled."""
        return CYCLES


if __name__ == "__main__":
    main(SettlingTrainer, "training.settle")
