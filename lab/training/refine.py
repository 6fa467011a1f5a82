"""Refine the reference model: `python -m training.refine FOLDER`. Interrupted, the same command goes on.

Goes on from what `training.train` left in the folder `base` beside, on documents most of which say what they say in ways
that the tasks do not have (`training.phrases`), and on long contexts more often than before: what a model reads right in
words that it learned by heart it has yet to read in words that it never met.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from training.continued import ContinuedTrainer
from training.plan import WARM_STEPS, Stage, held, reached
from training.shape import Shape
from training.train import main

SHORT = Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.5, 1.0, 0.1, 1.5, 0.75, 0.3)
_LONG: dict[str, Any] = {"context": 2176, "questions": 512, "chunks": (12, 27), "sparse": 0.5}
_LONG_ROWS = 2

CYCLES = (
    Stage(1400, SHORT, 6, 0.04, 1e-3, 0.1, 0.3, 0.3),
    Stage(1400, SHORT, 6, 0.04, 8e-4, 0.1, 0.3, 0.5),
    Stage(2200, replace(SHORT, varied=0.4, garbled=0.1), 6, 0.04, 8e-4, 0.1, 0.25, 0.5),
)


class RefiningTrainer(ContinuedTrainer):
    """Cycles of one learning rate that rises, is held and falls.

    What is exported lies halfway between the start and the end of the last cycle: it reads further wordings, and reads
    the tasks' own as well as before, which the end alone does not.
    """

    averaged = 1
    save_steps = 100
    after = "base"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """The cycles before they are scaled."""
        return CYCLES

    @classmethod
    def rows_of_steps(cls) -> set[int]:
        """Those of its cycles, and of steps on long contexts."""
        return {*super().rows_of_steps(), _LONG_ROWS}

    def lesson(self) -> tuple[Stage, float]:
        """Short rows or long ones, and the rate at this place of the cycle."""
        number, left = reached(self.plan, self.step)
        stage = self.plan[number]
        rate = stage.rate * pace(stage.steps - left, stage.steps, stage.holding or 0.0)
        if random.Random(f"{self.seed}/{self.step}").random() < stage.longer:
            stage = replace(stage, shape=replace(stage.shape, **_LONG), rows=_LONG_ROWS)
        return stage, rate

    def _export(self) -> None:
        """The start counts for the mean as each end does."""
        self.ended = [self.first_model().to(self.device).state_dict(), *self.ended]
        super()._export()


def pace(step: int, steps: int, holding: float) -> float:
    """Share of a cycle's learning rate: warm-up, then as it is held and falls."""
    return min((step + 1) / WARM_STEPS, held(steps - step, steps, holding))


if __name__ == "__main__":
    main(RefiningTrainer, "training.refine")
