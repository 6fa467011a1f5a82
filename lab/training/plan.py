"""The reference model's configuration and the stages of its training."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from training.initialize import initialize
from training.shape import Shape

VOCABULARY = 4096
CONTEXT, THETA = 4096, 100_000.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps on rows of one shape.

    Attributes:
        steps: number of steps.
        shape: of the rows.
        rows: per step, divided among the processes.
        copying: share of repetition rows, once repetition is learned.
        rate: learning rate before the common decay.
        hinting: weight of the hints.
        holding: in settling stages, the share of steps before the stage's own rate falls; None for the common decay.
        longer: in settling stages, the share of steps on the rows of the last stage with the common decay.
    """

    steps: int
    shape: Shape
    rows: int
    copying: float
    rate: float
    hinting: float = 0.0
    holding: float | None = None
    longer: float = 0.35


PLAN = (
    Stage(600, Shape(144, 176, (2, 2), (32, 64), 0.0, 0.9), 20, 0.12, 1e-3),
    Stage(600, Shape(144, 176, (2, 2), (32, 64), 0.0, 0.6), 20, 0.12, 1e-3, 0.3),
    Stage(2600, Shape(208, 240, (2, 3), (48, 72), 0.0, 0.3), 14, 0.10, 1e-3, 0.3),
    Stage(3200, Shape(768, 384, (4, 9), (48, 128), 0.3, 0.05), 6, 0.08, 1e-3, 0.2),
    Stage(1500, Shape(2176, 512, (12, 27), (48, 128), 0.5, 0.0), 2, 0.04, 1e-3, 0.1),
    Stage(2000, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.3, 1.0), 6, 0.04, 5e-4, 0.1, 0.0),
    Stage(7000, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.3, 1.0), 6, 0.04, 8e-4, 0.1, 0.5),
    Stage(6000, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.3, 1.0, 0.7), 6, 0.04, 8e-4, 0.1, 0.4),
    Stage(3500, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.3, 1.0, 0.25, 2.0), 6, 0.04, 8e-4, 0.1, 0.2),
    Stage(
        4000, Shape(768, 384, (4, 9), (48, 128), 0.4, 0.0, 0.5, 1.0, 0.25, 1.5), 6, 0.04, 8e-4, 0.1, 0.4, 0.6
    ),
)
_SETTLED = (
    "spliced",
    "stopping",
    "reworded",
    "stepwise",
)  # attributes that long rows of a settling stage take from it
EARLIER = 0.15  # share of steps on the shape of the stage before
WARM_STEPS, DECAY_FROM, LOWEST_FACTOR = 100, 0.7, 0.02


def configuration(tokenizer: PreTrainedTokenizerBase, **shape: int) -> LlamaConfig:
    """Return the configuration of the reference and the auxiliary model, which differ in `shape`."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Return the untrained reference model."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8, "head_dim": 64}
    model = LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=CONTEXT, **shape))
    initialize(model, seed)
    return model


def stage_at(plan: Sequence[Stage], step: int) -> tuple[int, int]:
    """Return the number of a step's stage, and the number of its steps from this one on."""
    ends = list(accumulate(stage.steps for stage in plan))
    number = bisect_right(ends, step)
    return number, ends[number] - step


def draw_stage(plan: Sequence[Stage], step: int, seed: int) -> tuple[Stage, float]:
    """Return a step's stage, sometimes with an earlier stage's rows, and its learning rate; equal in every process.

    Settling stages have their own rate and sometimes use the rows of the last stage before them.
    """
    number, left = stage_at(plan, step)
    stage, draw = plan[number], random.Random(f"{seed}/{step}").random()
    learning = [each for each in plan if each.holding is None]
    if stage.holding is None:
        chosen = plan[number - 1] if number and draw < EARLIER else stage
        return chosen, chosen.rate * rate_factor(step, sum(each.steps for each in learning))
    source = learning[-1] if draw < stage.longer else stage
    shape = replace(source.shape, **{name: getattr(stage.shape, name) for name in _SETTLED})
    rate = stage.rate * hold_then_decay(left, stage.steps, stage.holding)
    return replace(stage, shape=shape, rows=source.rows), rate


def rate_factor(step: int, steps: int) -> float:
    """Return the factor of a stage's learning rate: warm-up, constant, then linear decay."""
    if step < WARM_STEPS:
        return (step + 1) / WARM_STEPS
    return min(1.0, max(LOWEST_FACTOR, (1 - step / steps) / (1 - DECAY_FROM)))


def hold_then_decay(left: int, steps: int, holding: float) -> float:
    """Return the factor of a rate `left` steps before its end: constant for a share `holding`, then linear decay."""
    return min(1.0, max(LOWEST_FACTOR, left / (steps * (1 - holding))))
