"""Training rows: one context, then as many of its questions as fit, each of which sees the context and itself only.

A question so stands exactly where it would stand in a prompt of its own, in the ids that the prompt template makes.
Nothing separates the chunks of a context from each other: it is plain causal text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvweave.core import Prompt
from kvweave.evaluation.draft import Question
from kvweave.models.template import PromptTemplate
from training import abilities
from training.documents import Document, Writer

COPY = "copy"  # the name under which accuracy on repetition rows is counted


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows of a stage look.

    Attributes:
        context: tokens of the context part, padded to it.
        questions: tokens of the question part.
        chunks: fewest and most chunks of a document.
        chunk_tokens: smallest and largest size of a document's chunks.
        sparse: share of documents that are mostly haystack.
        easy: share of documents whose names are everyday words.
    """

    context: int
    questions: int
    chunks: tuple[int, int]
    chunk_tokens: tuple[int, int]
    sparse: float
    easy: float


@dataclass(slots=True)
class Rows:
    """A batch; every tensor is (B, T) with T = context + questions.

    Attributes:
        ids: token ids, 0 where padded.
        positions: rotary position of each token.
        segments: 0 for the context, k for its k-th question, -1 for padding.
        weights: of each token as a target, 0 where it is none.
        tasks: index of the task that each answer token counts for, -1 elsewhere.
        hints: the token that a sentence leads to, at the last two tokens of the sentence; -1 elsewhere.
        tokens: real tokens in the batch.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor
    weights: Tensor
    tasks: Tensor
    hints: Tensor
    tokens: int


class RowMaker:
    """Makes rows of one stage after another from one generator.

    Args:
        tokenizer: the tokenizer that is trained for.
        rng: the source of every choice.
        language_share: share of context tokens that are also language-modelling targets.
        language_weight: weight of those targets beside 1 for an answer's tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rng: random.Random,
        *,
        language_share: float = 0.25,
        language_weight: float = 0.1,
    ) -> None:
        self._rng = rng
        self._size = len(tokenizer)
        self._template = PromptTemplate(tokenizer)
        self._prefix = self._template.prefix_ids(None)
        self._end = tokenizer.eos_token_id
        self._encode = tokenizer.backend_tokenizer.encode
        self._plain = lru_cache(100_000)(self._template.text_ids)
        self._writer = Writer(rng, count=lambda text: len(self._plain(text)))
        self._hexadecimal = [tokenizer.convert_tokens_to_ids(sign) for sign in "0123456789abcdef"]
        self._language = (language_share, language_weight)
        self.tasks = [COPY]

    def batch(self, shape: Shape, seeds: Sequence[str], copying: float) -> Rows:
        """A row per seed, a share `copying` of which only repeat random tokens; a row depends on its seed alone."""
        rows = len(seeds)
        total = shape.context + shape.questions
        made = Rows(
            torch.zeros(rows, total, dtype=torch.long),
            torch.arange(total).repeat(rows, 1),
            torch.full((rows, total), -1, dtype=torch.long),
            torch.zeros(rows, total),
            torch.full((rows, total), -1, dtype=torch.long),
            torch.full((rows, total), -1, dtype=torch.long),
            0,
        )
        for row, seed in enumerate(seeds):
            self._rng.seed(seed)
            if self._rng.random() < copying:
                self._write_copying(made, row, shape)
            else:
                self._write_document(made, row, shape)
        return made

    def _write_document(self, made: Rows, row: int, shape: Shape) -> None:
        rng = self._rng
        while True:
            document = self._writer.document(
                rng.randint(*shape.chunks),
                sparse=shape.sparse,
                sizes=shape.chunk_tokens,
                easy=shape.easy,
            )
            context = list(self._prefix)
            hints: list[tuple[int, int]] = []
            for chunk in document.chunks:
                hints += self._hints(document, chunk, len(context))
                context += self._template.chunk_ids(chunk)
            if len(context) <= shape.context:
                break
        for place, token in hints:
            made.hints[row, place - 1 : place + 1] = token
        length = len(context)
        made.ids[row, :length] = torch.tensor(context)
        made.segments[row, :length] = 0
        share, weight = self._language
        picked = torch.tensor([rng.random() < share for _ in range(length)])
        picked[0] = False
        made.weights[row, :length] = picked * weight
        made.tokens += length
        self._write_questions(made, row, shape, document, length)

    def _hints(self, document: Document, chunk: str, start: int) -> list[tuple[int, int]]:
        """Where in the row the chunk's referring sentences end, and the first token of what each leads to."""
        found = [
            (at + len(text) - 1, self._plain(word)[0])
            for text, word in document.refers.items()
            if (at := chunk.find(text)) >= 0
        ]
        if not found:
            return []
        encoding = self._encode(chunk, add_special_tokens=False)
        return [(start + encoding.char_to_token(end), token) for end, token in found]

    def _write_questions(self, made: Rows, row: int, shape: Shape, document: Document, length: int) -> None:
        asked = [*document.questions, *abilities.questions(self._rng, document)]
        asked.sort(key=lambda question: self._rng.random() / _EAGERNESS.get(question.task, 1.0))
        at, end = shape.context, shape.context + shape.questions
        number = 0
        for question in asked:
            lead, reply = self._question_ids(question)
            size = len(lead) + len(reply)
            if at + size > end:
                continue
            number += 1
            span = slice(at, at + size)
            made.ids[row, span] = torch.tensor(lead + reply)
            made.positions[row, span] = torch.arange(length, length + size)
            made.segments[row, span] = number
            answer = slice(at + len(lead), at + size)
            made.weights[row, answer] = _WEIGHTS.get(question.task, 1.0)
            made.weights[row, at + size - 1] = 0.3  # when to stop is learned soon
            if question.task not in self.tasks:
                self.tasks.append(question.task)
            made.tasks[row, answer] = self.tasks.index(question.task)
            made.tasks[row, at + size - 1] = -1
            at += size
        made.tokens += at - shape.context

    def _question_ids(self, question: Question) -> tuple[list[int], list[int]]:
        rendered = self._template.render(Prompt(question.text, ()))
        lead = [*rendered.token_ids[rendered.spans[-1].start :]]
        return lead, [*self._plain(question.reply), self._end]

    def _write_copying(self, made: Rows, row: int, shape: Shape) -> None:
        """Random tokens over and over: the densest signal for looking something up and copying it."""
        rng, size = self._rng, shape.context + shape.questions
        words = range(3, self._size)
        signs = self._hexadecimal[: rng.choice((10, 16))]
        if rng.random() < 0.4:
            pool = signs if rng.random() < 0.4 else words
            block = [rng.choice(pool) for _ in range(rng.randint(8, min(120, size // 3)))]
            ids = (block * (size // len(block) + 1))[: size - 1]
            fresh = [index >= len(block) + 1 for index in range(len(ids))]
        else:  # keys with what follows them, words or figures, listed once and then in other orders
            kind, longest = (signs, 9) if rng.random() < 0.6 else (words, 5)
            keys = [
                [rng.choice(words), *(rng.choice(kind) for _ in range(rng.randint(1, longest)))]
                for _ in range(rng.randint(2, max(2, size // longest // 4)))
            ]
            ids, fresh = [], []
            while len(ids) < size - 1:
                first = not ids
                rng.shuffle(keys)
                for key in keys:
                    ids += key
                    fresh += [False] + [not first] * (len(key) - 1)
            ids, fresh = ids[: size - 1], fresh[: size - 1]
        made.ids[row, 0] = self._prefix[0]
        made.ids[row, 1:] = torch.tensor(ids)
        made.segments[row] = 0
        made.weights[row, 1:] = torch.tensor(fresh) * 0.5
        made.tasks[row, 1:] = torch.where(torch.tensor(fresh), 0, -1)
        made.tokens += size


# A question that takes several steps is asked sooner where not all of a context's questions fit.
_EAGERNESS = {
    "coref": 2.0,
    "contradiction": 2.0,
    "multivalue": 2.0,
    "order": 2.0,
}
_WEIGHTS = {
    "vartrack": 1.5,
    "twohop": 1.5,
    "coref": 1.5,
    "contradiction": 1.5,
    "multivalue": 1.5,
    "order": 1.5,
}
