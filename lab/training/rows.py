"""Training rows: one context, then as many of its questions as fit, each of which sees the context and itself only.

A question so stands exactly where it would stand in a prompt of its own, in the ids that the prompt template makes.
Nothing separates the chunks of a context from each other: it is plain causal text.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvweave.models.prompt import PromptTemplate
from kvweave.types import Prompt
from kvweave_lab.eval.draft import Question
from kvweave_lab.eval.longtext import LONG_TASKS
from kvweave_lab.eval.tasks import TASKS
from training import abilities
from training.documents import Document, Writer
from training.shape import Shape
from training.vocabulary import SPECIAL

COPY = "copy"  # the name under which accuracy on repetition rows is counted

# What a task asks beside its own question.
_BESIDE = ("vartrack_step", "twohop_fact", "coref_whole", "contradiction_kept")
COUNTED = (COPY, *TASKS, *_BESIDE, *abilities.NAMES, *LONG_TASKS)
"""The names that accuracy is counted under; `Rows.tasks` are places in it."""

LANGUAGE_SHARE = 0.25  # of a context's tokens are targets too
LANGUAGE_WEIGHT = 0.1  # theirs beside 1 of an answer's
COPY_WEIGHT = 0.5
_WEIGHTS = {
    "vartrack": 1.5,
    "twohop": 1.5,
    "coref": 1.5,
    "contradiction": 1.5,
    "multivalue": 1.5,
    "order": 1.5,
}
# A question that takes several steps is asked sooner where not all of a context's questions fit.
_EAGERNESS = {
    "coref": 2.0,
    "contradiction": 2.0,
    "multivalue": 2.0,
    "order": 2.0,
}


@dataclass(slots=True)
class Rows:
    """A batch; every tensor is (B, T) with T = context + questions.

    Attributes:
        ids: token ids, 0 where padded.
        positions: rotary position of each token.
        segments: 0 for the context, k for its k-th question, -1 for padding.
        weights: of each token as a target, 0 where it is none.
        tasks: place in COUNTED of the task that each answer token counts for, -1 elsewhere.
        hints: the token that a sentence leads to, at the last two tokens of the sentence, and in shapes that say whose a
            thing is the one that its owner's name begins with, at the thing's tokens; -1 elsewhere.
        ends: where the end of an answer is to be learned though the text goes on with another token.
        tokens: real tokens in the batch.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor
    tasks: Tensor
    hints: Tensor
    ends: Tensor
    tokens: int

    def to(self, device: torch.device) -> "Rows":
        """The same rows on a device."""
        tensors = (field.name for field in fields(self) if field.name != "tokens")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @classmethod
    def empty(cls, rows: int, total: int) -> "Rows":
        """Nothing but padding."""
        return cls(
            ids=torch.zeros(rows, total, dtype=torch.long),
            positions=torch.arange(total).repeat(rows, 1),
            segments=torch.full((rows, total), -1),
            weights=torch.zeros(rows, total),
            tasks=torch.full((rows, total), -1),
            hints=torch.full((rows, total), -1),
            ends=torch.zeros(rows, total, dtype=torch.bool),
            tokens=0,
        )


def question_ids(template: PromptTemplate, text: str) -> tuple[list[int], slice]:
    """What stands behind the context, up to the answer, and where in it the question's own words do."""
    rendered = template.render(Prompt(text, ()))
    start = rendered.spans[-1].start
    return list(rendered.token_ids[start:]), slice(*(place - start for place in rendered.user_rows))


class RowMaker:
    """Makes the rows of every stage for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rng = random.Random()
        self._words = range(len(SPECIAL), len(tokenizer))
        self.template = PromptTemplate(tokenizer)
        self._prefix = self.template.prefix_ids(None)
        self._end: int = tokenizer.eos_token_id
        self._encode = tokenizer.backend_tokenizer.encode
        self._plain = lru_cache(100_000)(self.template.text_ids)
        self._writer = Writer(
            self.rng, count=lambda text: len(self._plain(text)), vocabulary=sorted(tokenizer.get_vocab())
        )
        self._hexadecimal: list[int] = [tokenizer.convert_tokens_to_ids(sign) for sign in "0123456789abcdef"]

    def batch(self, shape: Shape, seeds: Sequence[str], copying: float) -> Rows:
        """A row per seed, a share `copying` of which only repeat random tokens; a row depends on its seed alone."""
        made = Rows.empty(len(seeds), shape.context + shape.questions)
        for row, seed in enumerate(seeds):
            self.rng.seed(seed)
            if self.rng.random() < copying:
                self._write_copying(made, row)
            else:
                self.write_row(made, row, shape)
        return made

    def write_row(self, made: Rows, row: int, shape: Shape) -> None:
        """Write one row of the shape into `made`: a document and questions about it."""
        document, context, hints = self._fitting(shape)
        length = len(context)
        made.ids[row, :length] = torch.tensor(context)
        made.segments[row, :length] = 0
        for places, token in hints:
            made.hints[row, places] = token
        picked = torch.tensor([self.rng.random() < LANGUAGE_SHARE for _ in range(length)])
        picked[0] = False
        made.weights[row, :length] = picked * LANGUAGE_WEIGHT
        made.tokens += length
        self._write_questions(made, row, shape, document, length)

    def _fitting(self, shape: Shape) -> tuple[Document, list[int], list[tuple[slice, int]]]:
        """A document that fits, the ids of the instruction and its chunks, and what `_hints` found in them."""
        while True:
            document = self._writer.document(self.rng.randint(*shape.chunks), shape)
            ids = list(self._prefix)
            hints: list[tuple[slice, int]] = []
            for chunk in document.chunks:
                hints += self._hints(document, chunk, len(ids), owned=shape.owned)
                ids += self.template.chunk_ids(chunk)
            if len(ids) <= shape.context:
                return document, ids, hints

    def _hints(self, document: Document, chunk: str, start: int, *, owned: bool) -> list[tuple[slice, int]]:
        """Where in the row the chunk's referring sentences end, and the first token of what each leads to.

        Those of things that are found by a name as well, if `owned`: all their tokens, and the first one of the name.
        """
        ends = [
            (at + len(text) - 1, word)
            for text, word in document.refers.items()
            if (at := chunk.find(text)) >= 0
        ]
        things = [
            (at + found.start(), thing, name)
            for text, (thing, name) in document.belongs.items()
            if owned and (at := chunk.find(text)) >= 0 and (found := re.search(rf"\b{thing}\b", text))
        ]
        if not ends and not things:
            return []
        token_of = self._encode(chunk, add_special_tokens=False).char_to_token
        tokens = [(token_of(end) - 1, token_of(end), word) for end, word in ends]
        tokens += [(token_of(at), token_of(at + len(thing) - 1), name) for at, thing, name in things]
        return [
            (slice(start + first, start + last + 1), self._plain(word)[0]) for first, last, word in tokens
        ]

    def _write_questions(self, made: Rows, row: int, shape: Shape, document: Document, length: int) -> None:
        """As many of the questions about a context of `length` tokens as fit."""
        asked = [*document.questions, *abilities.questions(self.rng, document)]
        asked.sort(key=lambda question: self.rng.random() / _EAGERNESS.get(question.task, 1.0))
        at, number = shape.context, 0
        for question in asked:
            lead, reply = self._question_ids(question)
            size = len(lead) + len(reply)
            if at + size > made.ids.shape[1]:
                continue
            number += 1
            answer, end = at + len(lead), at + size
            made.ids[row, at:end] = torch.tensor(lead + reply)
            made.positions[row, at:end] = torch.arange(length, length + size)
            made.segments[row, at:end] = number
            made.weights[row, answer:end] = _WEIGHTS.get(question.task, 1.0)
            made.weights[row, end - 1] = shape.stopping
            made.tasks[row, answer : end - 1] = COUNTED.index(question.task)
            at = end
        made.tokens += at - shape.context

    def _question_ids(self, question: Question) -> tuple[list[int], list[int]]:
        """What stands behind the context, up to the answer, and the answer with its end."""
        lead, _ = question_ids(self.template, question.text)
        return lead, [*self._plain(question.reply), self._end]

    def _write_copying(self, made: Rows, row: int) -> None:
        """Random tokens over and over: the densest signal for looking something up and copying it."""
        size = made.ids.shape[1]
        figures = self._hexadecimal[: self.rng.choice((10, 16))]
        ids, known = (self._block if self.rng.random() < 0.4 else self._listed)(size, figures)
        repeated = torch.tensor(known[: size - 1])
        made.ids[row, 0] = self._prefix[0]
        made.ids[row, 1:] = torch.tensor(ids[: size - 1])
        made.segments[row] = 0
        made.weights[row, 1:] = repeated * COPY_WEIGHT
        made.tasks[row, 1:] = torch.where(repeated, COUNTED.index(COPY), -1)
        made.tokens += size

    def _block(self, size: int, figures: Sequence[int]) -> tuple[list[int], list[bool]]:
        """At least `size` - 1 ids, one block of words or figures again and again, and which follow from those before."""
        rng = self.rng
        pool = figures if rng.random() < 0.4 else self._words
        block = [rng.choice(pool) for _ in range(rng.randint(8, min(120, size // 3)))]
        ids = block * (size // len(block) + 1)
        return ids, [index > len(block) for index in range(len(ids))]

    def _listed(self, size: int, figures: Sequence[int]) -> tuple[list[int], list[bool]]:
        """The same, keys with the words or figures that follow them, listed once and then in other orders."""
        rng = self.rng
        kind, longest = (figures, 9) if rng.random() < 0.6 else (self._words, 5)
        keys = [
            [rng.choice(self._words), *(rng.choice(kind) for _ in range(rng.randint(1, longest)))]
            for _ in range(rng.randint(2, max(2, size // longest // 4)))
        ]
        ids: list[int] = []
        known: list[bool] = []
        while len(ids) < size - 1:
            again = bool(ids)
            rng.shuffle(keys)
            for key in keys:
                ids += key
                known += [False] + [again] * (len(key) - 1)
        return ids, known
