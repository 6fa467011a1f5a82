import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kvweave.testing import tiny_tokenizer
from kvweave_lab.eval.documents import Question
from training import abilities
from training.documents import Document
from training.rows import COUNTED, RowMaker, Rows
from training.shape import Shape
from training.vocabulary import learn_tokenizer

SHAPE = Shape(context=900, questions=500, chunks=(2, 4), chunk_tokens=(150, 220), sparse=0.2, easy=0.3)
ROWS = 3


@dataclass
class Batch:
    """Rows with their documents and questions."""

    shape: Shape
    rows: Rows
    documents: list[Document]
    questions: list[list[Question]]

    def segments(self, row: int) -> list[torch.Tensor]:
        """Return the positions of each question of a row."""
        segments = self.rows.segments[row]
        return [(segments == number).nonzero().flatten() for number in range(1, int(segments.max()) + 1)]

    def length(self, row: int) -> int:
        """Return the number of tokens of a row's context."""
        return int((self.rows.segments[row] == 0).sum())

    def tasks(self, row: int, places: torch.Tensor) -> set[str]:
        """Return the tasks of the tokens at these positions."""
        return {COUNTED[number] for number in self.rows.tasks[row, places].tolist() if number >= 0}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def vocabulary() -> PreTrainedTokenizerFast:
    """A small tokenizer like the reference model's, from fewer documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.vocabulary.DOCUMENTS", 300)
        return learn_tokenizer(512, seed=0)


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """Runs without torch.compile, which takes longer than all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        yield


@pytest.fixture(scope="session")
def batch(tokenizer) -> Batch:
    """A batch of document rows."""
    return make_batch(tokenizer, SHAPE)


@pytest.fixture(scope="session")
def owned(tokenizer) -> Batch:
    """A batch with hints that name a thing's owner."""
    return make_batch(tokenizer, replace(SHAPE, stepwise=8.0, owned=True))


def make_batch(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Batch:
    documents, questions = [], []
    maker = RowMaker(tokenizer)
    write, draw_requests = maker.writer.document, abilities.questions

    def recorded_document(*args, **kwargs):
        documents.append(write(*args, **kwargs))
        questions.append(list(documents[-1].questions))
        return documents[-1]

    def recorded_requests(rng: random.Random, document: Document) -> list[Question]:
        requests = draw_requests(rng, document)
        questions[-1].extend(requests)
        return requests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maker.writer, "document", recorded_document)
        patch.setattr(abilities, "questions", recorded_requests)
        rows = maker.batch(shape, [str(row) for row in range(ROWS)], copying=0.0)
    assert len(documents) == ROWS, "a document did not fit; take a larger context"
    return Batch(shape, rows, documents, questions)
