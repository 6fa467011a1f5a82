"""Refine the reference model: `python -m training.refine FOLDER`; resumes if interrupted.

Starts from the model that `training.train` wrote to the sibling folder `base`. Most documents use sentences that the
tasks do not have (`training.phrases`), so that the model reads unknown wordings too. Long contexts are more frequent.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training.continued import ContinuedTrainer
from training.plan import WARM_STEPS, Stage, hold_then_decay, stage_at
from training.shape import Shape
from training.train import main

SHORT = Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.5, 1.0, 0.1, 1.5, 0.75, 0.3)
LONG_ROWS: dict[str, Any] = {"context": 2176, "questions": 512, "chunks": (12, 27), "sparse": 0.5}
_LONG_ROWS = 2

CYCLES = (
    Stage(1400, SHORT, 6, 0.04, 1e-3, 0.1, 0.3, 0.3),
    Stage(1400, SHORT, 6, 0.04, 8e-4, 0.1, 0.3, 0.5),
    Stage(2200, replace(SHORT, varied=0.4, garbled=0.1), 6, 0.04, 8e-4, 0.1, 0.25, 0.5),
)


class RefiningTrainer(ContinuedTrainer):
    """Cycles of a learning rate that rises, stays constant and falls.

    The exported weights are the mean of the initial weights and those at the end of the last cycle. Unlike the latter,
    they read the tasks' own wordings as well as before.
    """

    averaged = 1
    save_steps = 100
    after = "base"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """Return the cycles before scaling."""
        return CYCLES

    @classmethod
    def rows_of_steps(cls) -> set[int]:
        """Return the rows of its cycles and of steps on long contexts."""
        return {*super().rows_of_steps(), _LONG_ROWS}

    def next_stage(self) -> tuple[Stage, float]:
        """Return the cycle with short or long rows, and its current learning rate."""
        number, left = stage_at(self.plan, self.step)
        stage = self.plan[number]
        rate = stage.rate * rate_factor(stage.steps - left, stage.steps, stage.holding or 0.0)
        if random.Random(f"{self.seed}/{self.step}").random() < stage.longer:
            stage = replace(stage, shape=replace(stage.shape, **LONG_ROWS), rows=_LONG_ROWS)
        return stage, rate

    def _export(self) -> None:
        """Include the initial weights in the mean."""
        self.final_weights = [self.initial_model().to(self.device).state_dict(), *self.final_weights]
        super()._export()


def rate_factor(step: int, steps: int, holding: float) -> float:
    """Return the factor of a cycle's learning rate: warm-up, constant, then linear decay."""
    return min((step + 1) / WARM_STEPS, hold_then_decay(steps - step, steps, holding))


if __name__ == "__main__":
    main(RefiningTrainer, "training.refine")
