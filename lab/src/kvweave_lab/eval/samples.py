"""Samples: a prompt's chunks, its question, and what the answer has to contain; and how tasks become samples."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import xxhash

from kvweave_lab.eval.draft import Draft
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.layout import Laid, lay_out
from kvweave_lab.eval.tasks import METRIC_OF, TASKS
from kvweave_lab.eval.world import World

DOCUMENTS = 16
"""How many other documents stand in the knowledge base of a sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of an evaluation.

    Attributes:
        name: says where the sample comes from; the same in every run, and another one for another prompt.
        task: the task it counts for.
        chunks: the context, in prompt order.
        question: as a user would ask it.
        answers: reference answers; what several of them mean is the metric's business.
        metric: a name in METRICS.
        max_new_tokens: how long an answer may get.
        continuing: for every chunk whether it goes on where the one before was cut, as all but the first do where it
            is empty; the others begin a document.
        others: the chunks of other documents in the same knowledge base.
    """

    name: str
    task: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    continuing: tuple[bool, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()

    @property
    def documents(self) -> list[list[str]]:
        """The chunks, document by document."""
        found: list[list[str]] = []
        for text, continues in zip(self.chunks, self.continuing or (True,) * len(self.chunks), strict=True):
            if found and continues:
                found[-1].append(text)
            else:
                found.append([text])
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """How generated samples look.

    Attributes:
        split: train, dev, test or hidden.
        seed: two settings that are equal give equal samples.
        context_tokens: length of the context, in tokens of the model under test: what its chunks add up to. They
            are filled with whole sentences, which leaves it up to a few percent short.
        chunk_tokens: the largest that a chunk may be, in the same tokens; chunks are smaller where a task needs more
            of them than the context otherwise has.
    """

    split: str
    seed: int
    context_tokens: int
    chunk_tokens: int


def generate(
    task: str, setting: Setting, samples: int, count: Callable[[str], int], haystack: Haystack
) -> list[Sample]:
    """The first `samples` samples of a task beside others; asking for more later gives the same ones first.

    `count` is the token count of a text under the model's tokenizer. Raises InvalidRequest when the
    context is too short for the task.
    """
    drawn = _drawn(task, setting, max(samples, DOCUMENTS + 1), count, haystack)
    return beside_others(list(drawn))[:samples]


def _drawn(
    task: str, setting: Setting, samples: int, count: Callable[[str], int], haystack: Haystack
) -> Iterator[Sample]:
    s = setting
    behind = cache(_behind_a_sentence(count))
    for number in range(samples):
        source = f"{task}/{s.split}/{s.context_tokens}/{s.chunk_tokens}/{s.seed}/{number}"
        _, draft, laid = written(task, source, setting, behind, haystack)
        asked = draft.questions[0]
        texts = tuple(chunk.text for chunk in laid)
        prompt = (texts, asked.text, asked.answers, METRIC_OF[task], 2 * count(asked.reply) + 8)
        continuing = tuple(chunk.continues for chunk in laid)
        yield Sample(f"{source}-{_digest(prompt)}", task, *prompt, continuing=continuing)


def written(
    task: str, source: str, setting: Setting, count: Callable[[str], int], haystack: Haystack
) -> tuple[World, Draft, list[Laid]]:
    """What was drawn for one context of a task, what it says and asks, and its chunks; `source` seeds every choice.

    `count` is the token count of a sentence. Raises InvalidRequest when the context is too short for the task.
    """
    world = World(random.Random(source), setting.split)
    draft = TASKS[task](world)
    natural = haystack.without(world.drawn)
    laid = lay_out(world.rng, draft.pieces, setting.context_tokens, setting.chunk_tokens, count, natural)
    return world, draft, laid


def beside_others(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, the documents of some others beside each: the first DOCUMENTS of them that are not its own."""
    first = [sample.chunks for sample in samples[: DOCUMENTS + 1]]
    return [
        replace(sample, others=tuple(chunks for chunks in first if chunks != sample.chunks)[:DOCUMENTS])
        for sample in samples
    ]


def _digest(prompt: tuple[object, ...]) -> str:
    """Tells a journal that what once had the same source was another prompt."""
    return xxhash.xxh3_64_hexdigest(json.dumps(prompt).encode())[:8]


def _behind_a_sentence(count: Callable[[str], int]) -> Callable[[str], int]:
    """Token counts as inside a chunk, the space before a sentence included, so that a chunk's sentences add up."""
    before = count(".")
    return lambda text: count(f". {text}") - before
