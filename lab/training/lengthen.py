"""Continue the reference model to texts of 8K tokens: `python -m training.lengthen FOLDER`. Interrupted, the same command goes on.

Positions that were never seen are learned with slower rotation, first on rows as long as before, then on long texts of
4K and 8K tokens; documents come in between all the way, so that what was learned stays.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import LlamaForCausalLM

from training.continued import ContinuedTrainer
from training.long_rows import LongRowMaker, of_length
from training.plan import Stage, drawn
from training.shape import Shape
from training.train import main

POSITIONS, LONGER_THETA = 8704, 1_000_000.0
DOCUMENTS = 0.3  # share of steps on documents once rows are long texts
_DOCUMENTS = Stage(0, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.5, 1.0, 0.25, 1.5), 6, 0.04, 0.0)

LONG_PLAN = (
    Stage(120, Shape(2176, 512, (12, 27), (48, 128), 0.5, 0.0, 0.5, 1.0, 0.25, 1.5), 2, 0.04, 3e-4),
    Stage(460, of_length(4096), 2, 0.04, 3e-4),
    Stage(120, of_length(POSITIONS), 2, 0.04, 3e-4),
)


class LongTrainer(ContinuedTrainer):
    """Goes on from the base model's weights; only the last stage's are exported, since earlier ones know no such length."""

    averaged = 1
    save_steps = 25  # a step on long texts takes many times as long
    row_maker = LongRowMaker
    after = "base"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """The plan before it is scaled."""
        return LONG_PLAN

    @staticmethod
    def loaded(folder: Path) -> LlamaForCausalLM:
        """The weights, for more positions that turn more slowly."""
        rope = {"rope_type": "default", "rope_theta": LONGER_THETA}
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
            folder, dtype="float32", max_position_embeddings=POSITIONS, rope_parameters=rope
        )
        return model

    def lesson(self) -> tuple[Stage, float]:
        """A stage's rows, or documents."""
        stage, rate = drawn(self.plan, self.step, self.seed)
        if random.Random(f"{self.seed}/{self.step}/documents").random() < DOCUMENTS:
            stage = replace(_DOCUMENTS, copying=stage.copying)
        return stage, rate


if __name__ == "__main__":
    main(LongTrainer, "training.lengthen")
