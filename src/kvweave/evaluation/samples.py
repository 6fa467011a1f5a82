"""Samples: a prompt's chunks, its question, and what the answer has to contain; and how tasks become samples."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvweave.evaluation.haystack import Haystack
from kvweave.evaluation.layout import lay_out
from kvweave.evaluation.tasks import TASKS
from kvweave.evaluation.world import World

FULLEST = 0.75  # the smallest chunk of a document has this share of the largest one's tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of an evaluation.

    Attributes:
        name: unique in a run; says where the sample comes from and is the same in every run.
        task: the task it counts for.
        chunks: the context, in prompt order.
        question: as a user would ask it.
        answers: reference answers; what several of them mean is the metric's business.
        metric: a name in METRICS.
        max_new_tokens: how long an answer may get.
    """

    name: str
    task: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Setting:
    """How generated samples look.

    Attributes:
        split: train, dev, test or hidden.
        seed: two settings that are equal give equal samples.
        context_tokens: nominal length of the context, in tokens of the model under test: what chunks of average
            size add up to. They are filled with whole sentences, which leaves them a little short of it.
        chunk_tokens: the largest chunk, in the same tokens.
    """

    split: str
    seed: int
    context_tokens: int
    chunk_tokens: int


def generate(
    task: str, setting: Setting, samples: int, count: Callable[[str], int], haystack: Haystack
) -> Iterator[Sample]:
    """The first `samples` samples of a task; asking for more later gives the same ones first.

    `count` is the token count of a text under the model's tokenizer. Raises InvalidRequest when the
    context is too short for the task.
    """
    s = setting
    chunks = max(1, round(s.context_tokens / s.chunk_tokens / (1 + FULLEST) * 2))
    for number in range(samples):
        name = f"{task}/{s.split}/{s.context_tokens}/{s.chunk_tokens}/{s.seed}/{number}"
        rng = random.Random(name)
        draft = TASKS[task](World(rng, s.split))
        budgets = [rng.randint(int(s.chunk_tokens * FULLEST), s.chunk_tokens) for _ in range(chunks)]
        texts = lay_out(rng, draft.pieces, budgets, _behind_a_sentence(count), haystack)
        asked = draft.questions[0]
        room = 2 * count(asked.reply) + 8
        yield Sample(name, task, tuple(texts), asked.text, asked.answers, "string_match_all", room)


def _behind_a_sentence(count: Callable[[str], int]) -> Callable[[str], int]:
    """Token counts as inside a chunk, the space before a sentence included, so that a chunk's sentences add up."""
    before = count(".")
    return lambda text: count(f". {text}") - before
