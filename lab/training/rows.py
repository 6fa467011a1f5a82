"""Training rows: one context, then as many of its questions as fit, each of which attends to the context and itself only.

A question has the positions and token ids that it would have in its own prompt. The context is plain causal text without
separation of chunks.
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
from kvweave_lab.eval.documents import Question
from kvweave_lab.eval.long_texts import LONG_TASKS
from kvweave_lab.eval.tasks import TASKS
from training import abilities
from training.documents import Document, Writer
from training.shape import Shape
from training.vocabulary import SPECIAL

COPY = "copy"  # the name of the accuracy on repetition rows

# Secondary questions of tasks.
_SECONDARY = ("vartrack_step", "twohop_fact", "coref_whole", "contradiction_kept")
COUNTED = (COPY, *TASKS, *_SECONDARY, *abilities.NAMES, *LONG_TASKS)
"""The names of accuracies; `Rows.tasks` are indexes into it."""

LANGUAGE_SHARE = 0.25  # share of a context's tokens that are targets
LANGUAGE_WEIGHT = 0.1  # their weight; an answer's tokens have 1
COPY_WEIGHT = 0.5
_WEIGHTS = {
    "vartrack": 1.5,
    "twohop": 1.5,
    "coref": 1.5,
    "contradiction": 1.5,
    "multivalue": 1.5,
    "order": 1.5,
}
# If not all of a context's questions fit, questions of several steps have priority.
_PRIORITY = {
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
        weights: of each token as a target, 0 if it is none.
        tasks: index in COUNTED of each answer token's task, -1 elsewhere.
        hints: the first token of what a sentence refers to, at the sentence's last two tokens. In shapes with `owned`,
            also the first token of an owner's name, at the owned thing's tokens. -1 elsewhere.
        ends: where the end of an answer is the target, although the text continues with another token.
        tokens: number of tokens without padding.
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
        """Return the rows on a device."""
        tensors = (field.name for field in fields(self) if field.name != "tokens")
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})

    @classmethod
    def empty(cls, rows: int, total: int) -> "Rows":
        """Return rows of padding."""
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
    """Return the ids between context and answer, and the slice of the question's own words in them."""
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
        self._plain = lru_cache(100_000)(self.template.tokenize)
        self.writer = Writer(
            self.rng, count=lambda text: len(self._plain(text)), vocabulary=sorted(tokenizer.get_vocab())
        )
        self._hexadecimal: list[int] = [tokenizer.convert_tokens_to_ids(sign) for sign in "0123456789abcdef"]

    def batch(self, shape: Shape, seeds: Sequence[str], copying: float) -> Rows:
        """Return a row for each seed, a share `copying` of them repetition rows; a row depends on its seed only."""
        rows = Rows.empty(len(seeds), shape.context + shape.questions)
        for row, seed in enumerate(seeds):
            self.rng.seed(seed)
            if self.rng.random() < copying:
                self._write_repetition(rows, row)
            else:
                self.write_row(rows, row, shape)
        return rows

    def write_row(self, rows: Rows, row: int, shape: Shape) -> None:
        """Write one row of the shape into `rows`: a document and questions about it."""
        document, context, hints = self._draw_fitting_document(shape)
        length = len(context)
        rows.ids[row, :length] = torch.tensor(context)
        rows.segments[row, :length] = 0
        for at, token in hints:
            rows.hints[row, at] = token
        drawn = torch.tensor([self.rng.random() < LANGUAGE_SHARE for _ in range(length)])
        drawn[0] = False
        rows.weights[row, :length] = drawn * LANGUAGE_WEIGHT
        rows.tokens += length
        self._write_questions(rows, row, shape, document, length)

    def _draw_fitting_document(self, shape: Shape) -> tuple[Document, list[int], list[tuple[slice, int]]]:
        """Return a document that fits, the ids of the instruction and its chunks, and the hints in them."""
        while True:
            document = self.writer.document(self.rng.randint(*shape.chunks), shape)
            ids = list(self._prefix)
            hints: list[tuple[slice, int]] = []
            for chunk in document.chunks:
                hints += self._hints(document, chunk, len(ids), owned=shape.owned)
                ids += self.template.chunk_ids(chunk)
            if len(ids) <= shape.context:
                return document, ids, hints

    def _hints(self, document: Document, chunk: str, start: int, *, owned: bool) -> list[tuple[slice, int]]:
        """Return the slice of the last two tokens of each referring sentence, and the first token of what it refers to.

        If `owned`, also return the tokens of each owned thing and the first token of its owner's name.
        """
        ends = [
            (at + len(text) - 1, word)
            for text, word in document.refers.items()
            if (at := chunk.find(text)) >= 0
        ]
        things = [
            (at + match.start(), thing, name)
            for text, (thing, name) in document.belongs.items()
            if owned and (at := chunk.find(text)) >= 0 and (match := re.search(rf"\b{thing}\b", text))
        ]
        if not ends and not things:
            return []
        token_of = self._encode(chunk, add_special_tokens=False).char_to_token
        tokens = [(token_of(end) - 1, token_of(end), word) for end, word in ends]
        tokens += [(token_of(at), token_of(at + len(thing) - 1), name) for at, thing, name in things]
        return [
            (slice(start + first, start + last + 1), self._plain(word)[0]) for first, last, word in tokens
        ]

    def _write_questions(self, rows: Rows, row: int, shape: Shape, document: Document, length: int) -> None:
        """Write as many questions about a context of `length` tokens as fit."""
        questions = [*document.questions, *abilities.questions(self.rng, document)]
        questions.sort(key=lambda question: self.rng.random() / _PRIORITY.get(question.task, 1.0))
        at, number = shape.context, 0
        for question in questions:
            lead, reply = self._question_ids(question)
            size = len(lead) + len(reply)
            if at + size > rows.ids.shape[1]:
                continue
            number += 1
            answer, end = at + len(lead), at + size
            rows.ids[row, at:end] = torch.tensor(lead + reply)
            rows.positions[row, at:end] = torch.arange(length, length + size)
            rows.segments[row, at:end] = number
            rows.weights[row, answer:end] = _WEIGHTS.get(question.task, 1.0)
            rows.weights[row, end - 1] = shape.stopping
            rows.tasks[row, answer : end - 1] = COUNTED.index(question.task)
            at = end
        rows.tokens += at - shape.context

    def _question_ids(self, question: Question) -> tuple[list[int], list[int]]:
        """Return the ids between context and answer, and the answer's ids with the end token."""
        lead, _ = question_ids(self.template, question.text)
        return lead, [*self._plain(question.reply), self._end]

    def _write_repetition(self, rows: Rows, row: int) -> None:
        """Write a row of repeated random tokens, the densest signal for looking up and copying."""
        size = rows.ids.shape[1]
        digits = self._hexadecimal[: self.rng.choice((10, 16))]
        ids, known = (self._repeated_block if self.rng.random() < 0.4 else self._shuffled_list)(size, digits)
        repeated = torch.tensor(known[: size - 1])
        rows.ids[row, 0] = self._prefix[0]
        rows.ids[row, 1:] = torch.tensor(ids[: size - 1])
        rows.segments[row] = 0
        rows.weights[row, 1:] = repeated * COPY_WEIGHT
        rows.tasks[row, 1:] = torch.where(repeated, COUNTED.index(COPY), -1)
        rows.tokens += size

    def _repeated_block(self, size: int, digits: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return at least `size` - 1 ids, a repeated block of words or digits, and which of them are predictable."""
        rng = self.rng
        pool = digits if rng.random() < 0.4 else self._words
        block = [rng.choice(pool) for _ in range(rng.randint(8, min(120, size // 3)))]
        ids = block * (size // len(block) + 1)
        return ids, [index > len(block) for index in range(len(ids))]

    def _shuffled_list(self, size: int, digits: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return the same for a list of keys with words or digits after them, repeated in random orders."""
        rng = self.rng
        kind, longest = (digits, 9) if rng.random() < 0.6 else (self._words, 5)
        keys = [
            [rng.choice(self._words), *(rng.choice(kind) for _ in range(rng.randint(1, longest)))]
            for _ in range(rng.randint(2, max(2, size // longest // 4)))
        ]
        ids: list[int] = []
        known: list[bool] = []
        while len(ids) < size - 1:
            repeated = bool(ids)
            rng.shuffle(keys)
            for key in keys:
                ids += key
                known += [False] + [repeated] * (len(key) - 1)
        return ids, known
