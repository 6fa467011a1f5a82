"""Samples: a prompt's chunks, its question, and what the answer has to contain; and how tasks generate them."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import xxhash

from kvweave_lab.eval.documents import Apart, Draft
from kvweave_lab.eval.layout import GeneratedChunk, lay_out
from kvweave_lab.eval.tasks import EVERY_TASK, METRIC_OF
from kvweave_lab.eval.tasks.mixed import PERMUTED
from kvweave_lab.eval.world import Haystack, World

OTHER_DOCUMENTS = 16
"""The number of other documents in a sample's knowledge base."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of an evaluation.

    Attributes:
        name: identifies the sample; the same prompt has the same name in every run, another prompt has another one.
        task: the task for which it counts.
        chunks: the context, in prompt order.
        question: as a user would ask it.
        answers: reference answers; the metric decides what several of them mean.
        metric: a name in METRICS.
        max_new_tokens: maximum length of an answer.
        continuing: for every chunk whether it continues the document of the chunk before it; the others begin a
            document. If empty, all but the first chunk continue.
        others: the chunks of other documents in the same knowledge base.
        written: the chunks of each document of the prompt, where the prompt has not all of them, or in another order; else
            empty, and `continuing` says which chunks belong together.
        placement: where the sentence that the question is about stands, for tasks that draw it.
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
    written: tuple[tuple[str, ...], ...] = ()
    placement: str = ""

    @property
    def documents(self) -> list[list[str]]:
        """The chunks of each document, those among them that are not in the prompt."""
        if self.written:
            return [list(chunks) for chunks in self.written]
        found: list[list[str]] = []
        for text, continues in zip(self.chunks, self.continuing or (True,) * len(self.chunks), strict=True):
            if found and continues:
                found[-1].append(text)
            else:
                found.append([text])
        return found


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What generated samples are like.

    Attributes:
        split: train, dev, test or hidden.
        seed: equal specs give equal samples.
        context_tokens: length of all chunks together, in tokens of the model under test. Whole sentences fill the
            chunks, so the context is up to a few percent shorter.
        chunk_tokens: the largest chunk, in the same tokens; chunks are smaller if a task needs more of them than the
            context otherwise has.
    """

    split: str
    seed: int
    context_tokens: int
    chunk_tokens: int


def generate(
    task: str, spec: SampleSpec, samples: int, count: Callable[[str], int], haystack: Haystack
) -> list[Sample]:
    """Return the first `samples` samples of a task, each with other documents; a larger number begins with the same ones.

    `count` returns the token count of a text under the model's tokenizer. Raises InvalidRequest if the context is too
    short for the task.
    """
    drawn = _draw_samples(task, spec, max(samples, OTHER_DOCUMENTS + 1), count, haystack)
    return with_other_documents(list(drawn))[:samples]


def _draw_samples(
    task: str, spec: SampleSpec, samples: int, count: Callable[[str], int], haystack: Haystack
) -> Iterator[Sample]:
    count_sentence = cache(_count_inside_chunk(count))
    as_written = PERMUTED.get(task, task)
    for number in range(samples):
        source = f"{as_written}/{spec.split}/{spec.context_tokens}/{spec.chunk_tokens}/{spec.seed}/{number}"
        _, draft, chunks = draw_context(task, source, spec, count_sentence, haystack)
        shown = [chunk for chunk in chunks if chunk.retrieved]
        placement = draft.placement
        if task in PERMUTED:
            shown = _permuted(random.Random(f"{source}/{task}"), shown, draft)
            placement = f"{placement}, permuted"
        question = draft.questions[0]
        texts = tuple(chunk.text for chunk in shown)
        prompt = (texts, question.text, question.answers, METRIC_OF[task], 2 * count(question.reply) + 8)
        digest = _digest((task, *prompt) if task in PERMUTED else prompt)
        yield Sample(
            f"{source}-{digest}",
            task,
            *prompt,
            continuing=() if placement else tuple(chunk.continues for chunk in shown),
            written=_documents(chunks) if placement else (),
            placement=placement,
        )


def _permuted(rng: random.Random, chunks: list[GeneratedChunk], draft: Draft) -> list[GeneratedChunk]:
    """Return chunks in a drawn order in which the sentence asked about stands before the one that it refers to.

    Where the chunk of one of the two was not retrieved, any order will do.
    """
    asked = next(piece for piece in draft.pieces if isinstance(piece, Apart))
    order = list(chunks)
    while True:
        rng.shuffle(order)
        found = [text for chunk in order for text in (asked.first, asked.then) if text in chunk.text]
        if asked.missing or found == [asked.then, asked.first]:
            return order


def _documents(chunks: Sequence[GeneratedChunk]) -> tuple[tuple[str, ...], ...]:
    """Return the chunks of each document in its order."""
    of_document: dict[int, list[str]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.document):
        of_document.setdefault(chunk.document[0], []).append(chunk.text)
    return tuple(map(tuple, of_document.values()))


def draw_context(
    task: str, source: str, spec: SampleSpec, count: Callable[[str], int], haystack: Haystack
) -> tuple[World, Draft, list[GeneratedChunk]]:
    """Draw one context of a task; return its world, its facts and questions, and its chunks.

    `source` seeds every choice, `count` returns the token count of a sentence. Raises InvalidRequest if the context
    is too short for the task.
    """
    world = World(random.Random(source), spec.split)
    draft = EVERY_TASK[task](world)
    natural = haystack.without(world.drawn)
    chunks = lay_out(world.rng, draft.pieces, spec.context_tokens, spec.chunk_tokens, count, natural)
    return world, draft, chunks


def with_other_documents(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples, each with the documents of the first OTHER_DOCUMENTS other ones."""
    first = [sample.chunks for sample in samples[: OTHER_DOCUMENTS + 1]]
    return [
        replace(sample, others=tuple(chunks for chunks in first if chunks != sample.chunks)[:OTHER_DOCUMENTS])
        for sample in samples
    ]


def _digest(prompt: tuple[object, ...]) -> str:
    """Return a digest that gives another prompt from the same source another name."""
    return xxhash.xxh3_64_hexdigest(json.dumps(prompt).encode())[:8]


def _count_inside_chunk(count: Callable[[str], int]) -> Callable[[str], int]:
    """Return a token count that includes the space before a sentence, so that a chunk's sentences add up."""
    before = count(".")
    return lambda text: count(f". {text}") - before
