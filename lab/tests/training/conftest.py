import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.draft import Question
from training import abilities
from training.documents import Document
from training.rows import COUNTED, RowMaker, Rows
from training.shape import Shape
from training.vocabulary import learn

SHAPE = Shape(context=900, questions=500, chunks=(2, 4), chunk_tokens=(150, 220), sparse=0.2, easy=0.3)
ROWS = 3


@dataclass
class Batch:
    """Rows, and what they were made from."""

    shape: Shape
    rows: Rows
    documents: list[Document]
    questions: list[list[Question]]

    def segments(self, row: int) -> list[torch.Tensor]:
        """Places of each question of a row."""
        segments = self.rows.segments[row]
        return [(segments == number).nonzero().flatten() for number in range(1, int(segments.max()) + 1)]

    def length(self, row: int) -> int:
        """Tokens of a row's context."""
        return int((self.rows.segments[row] == 0).sum())

    def tasks(self, row: int, places: torch.Tensor) -> set[str]:
        """What the tokens at these places count for."""
        return {COUNTED[number] for number in self.rows.tasks[row, places].tolist() if number >= 0}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def vocabulary() -> PreTrainedTokenizerFast:
    """A small one of the reference model's kind, from fewer documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.vocabulary.DOCUMENTS", 300)
        return learn(512, seed=0)


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """Steps run as they are written: compiling them takes longer than all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        yield


@pytest.fixture(scope="session")
def batch(tokenizer) -> Batch:
    """Rows of documents, with the documents they were made from."""
    return made(tokenizer, SHAPE)


@pytest.fixture(scope="session")
def owned(tokenizer) -> Batch:
    """Others, with hints that say whose a thing is."""
    return made(tokenizer, replace(SHAPE, stepwise=8.0, owned=True))


def made(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Batch:
    documents, questions = [], []
    maker = RowMaker(tokenizer)
    write, able = maker._writer.document, abilities.questions

    def writing(*args, **kwargs):
        documents.append(write(*args, **kwargs))
        questions.append(list(documents[-1].questions))
        return documents[-1]

    def also(rng: random.Random, document: Document) -> list[Question]:
        more = able(rng, document)
        questions[-1].extend(more)
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maker._writer, "document", writing)
        patch.setattr(abilities, "questions", also)
        rows = maker.batch(shape, [str(row) for row in range(ROWS)], copying=0.0)
    assert len(documents) == ROWS, "a document did not fit; take a larger context"
    return Batch(shape, rows, documents, questions)
