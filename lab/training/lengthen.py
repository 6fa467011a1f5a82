"""Train the reference model further on texts of 8K tokens: `python -m training.lengthen FOLDER`; resumes if interrupted.

Rotation becomes slower. The model first learns it on rows of known length, then on long texts of 4K and 8K tokens.
A share of the steps keeps using documents, so that the model does not forget them.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import LlamaForCausalLM

from training.continued import ContinuedTrainer
from training.long_rows import LongRowMaker, of_length
from training.plan import Stage, draw_stage
from training.shape import Shape
from training.train import main

POSITIONS, LONGER_THETA = 8704, 1_000_000.0
DOCUMENTS = 0.3  # share of steps on documents in all stages
_DOCUMENTS = Stage(0, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.5, 1.0, 0.25, 1.5), 6, 0.04, 0.0)

LONG_PLAN = (
    Stage(120, Shape(2176, 512, (12, 27), (48, 128), 0.5, 0.0, 0.5, 1.0, 0.25, 1.5), 2, 0.04, 3e-4),
    Stage(460, of_length(4096), 2, 0.04, 3e-4),
    Stage(120, of_length(POSITIONS), 2, 0.04, 3e-4),
)


class LongTrainer(ContinuedTrainer):
    """Starts from the base model's weights; exports only the last stage's, since earlier stages have shorter texts."""

    averaged = 1
    save_steps = 25  # steps on long texts take much longer
    row_maker = LongRowMaker
    after = "base"

    @staticmethod
    def stages() -> Sequence[Stage]:
        """Return the plan before scaling."""
        return LONG_PLAN

    @staticmethod
    def loaded(folder: Path) -> LlamaForCausalLM:
        """Return the model in a folder with more positions and slower rotation."""
        rope = {"rope_type": "default", "rope_theta": LONGER_THETA}
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
            folder, dtype="float32", max_position_embeddings=POSITIONS, rope_parameters=rope
        )
        return model

    def next_stage(self) -> tuple[Stage, float]:
        """Return the step's stage, sometimes one of documents, and its learning rate."""
        stage, rate = draw_stage(self.plan, self.step, self.seed)
        if random.Random(f"{self.seed}/{self.step}/documents").random() < DOCUMENTS:
            stage = replace(_DOCUMENTS, copying=stage.copying)
        return stage, rate


if __name__ == "__main__":
    main(LongTrainer, "training.lengthen")
