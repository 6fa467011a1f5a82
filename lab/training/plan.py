"""What is trained, on what, for how long: the reference model's shape and the stages of its training."""

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
        steps: how many.
        shape: of the rows.
        rows: per step, shared out among the processes.
        copying: share of rows that only repeat, once repetition is learned.
        rate: learning rate before the common decay.
        hinting: weight of the hints.
        holding: share of the stage before its own rate falls, in stages that settle; None for the common decay.
        longer: share of steps that a stage that settles spends on the rows of the last stage that learned.
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
_SETTLED = ("spliced", "stopping", "reworded", "stepwise")  # what long rows of a settling stage take from it
EARLIER = 0.15  # share of steps on the shape of the stage before
WARM_STEPS, DECAY_FROM, LOWEST_PACE = 100, 0.7, 0.02


def configuration(tokenizer: PreTrainedTokenizerBase, **shape: int) -> LlamaConfig:
    """What both shipped models have in common, with sizes of their own."""
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
    """The reference model before training."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 8, "head_dim": 64}
    model = LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=CONTEXT, **shape))
    initialize(model, seed)
    return model


def reached(plan: Sequence[Stage], step: int) -> tuple[int, int]:
    """The number of the stage that a step belongs to, and how many of its steps are left with this one."""
    ends = list(accumulate(stage.steps for stage in plan))
    number = bisect_right(ends, step)
    return number, ends[number] - step


def drawn(plan: Sequence[Stage], step: int, seed: int) -> tuple[Stage, float]:
    """What a step trains, now and then on rows of an earlier shape, and its learning rate; the same in every process.

    Stages that hold a rate of their own settle what the others learned, and go back to the last of those.
    """
    number, left = reached(plan, step)
    stage, draw = plan[number], random.Random(f"{seed}/{step}").random()
    learning = [each for each in plan if each.holding is None]
    if stage.holding is None:
        chosen = plan[number - 1] if number and draw < EARLIER else stage
        return chosen, chosen.rate * pace(step, sum(each.steps for each in learning))
    source = learning[-1] if draw < stage.longer else stage
    shape = replace(source.shape, **{name: getattr(stage.shape, name) for name in _SETTLED})
    rate = stage.rate * held(left, stage.steps, stage.holding)
    return replace(stage, shape=shape, rows=source.rows), rate


def pace(step: int, steps: int) -> float:
    """Share of a stage's learning rate: warm-up, constant, then linear to almost nothing."""
    if step < WARM_STEPS:
        return (step + 1) / WARM_STEPS
    return min(1.0, max(LOWEST_PACE, (1 - step / steps) / (1 - DECAY_FROM)))


def held(left: int, steps: int, holding: float) -> float:
    """Share of a rate with `left` of its steps to go: constant for a share `holding` of them, then linear to almost nothing."""
    return min(1.0, max(LOWEST_PACE, left / (steps * (1 - holding))))
