"""Settle the refined reference model: `python -m training.settle FOLDER`; resumes if interrupted.

Starts from the model that `training.refine` wrote to the sibling folder `refined`. Names share endings, so that the model
has to match complete names, and values consist of arbitrary tokens. Hints also name a thing's owner, except in the last
cycle.
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
    """Further cycles; exports the mean of the initial weights and those at the ends of the last two cycles."""

    averaged = 2
    after = "refined"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """Return the cycles before scaling."""
        return CYCLES


if __name__ == "__main__":
    main(SettlingTrainer, "training.settle")
