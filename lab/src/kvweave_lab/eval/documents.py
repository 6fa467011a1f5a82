"""A task's draft of a document: pieces of text that state facts, and questions about them.

`layout.py` places the pieces in chunks among natural text. Knows neither tasks nor models.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvweave_lab.eval.world import World


@dataclass(frozen=True, slots=True)
class Anywhere:
    """A sentence that may be in any chunk."""

    text: str


@dataclass(frozen=True, slots=True)
class InOrder:
    """Sentences in this order, each in a chunk of its own if there are enough chunks."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AcrossCut:
    """Two consecutive sentences with the end of a chunk between them; `first` is needed to understand `then`."""

    first: str
    then: str


@dataclass(frozen=True, slots=True)
class Together:
    """Sentences that follow each other inside one chunk."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """Two sentences of one document in different chunks; `first` is needed to understand `then`.

    `first` ends its chunk. Nothing else in the context lies between the two that `then` could refer to.

    Attributes:
        first: the sentence that names something.
        then: the sentence that refers to it.
        sentences: number of natural sentences between the start of the second chunk and `then`.
        chunks_back: 1 if the two chunks follow each other in the prompt, 2 with another chunk between them.
        inserted: the chunk between them is of another document, so that the two follow each other in theirs.
        missing: the sentence whose chunk is in the document but not in the prompt; None if both are retrieved.
    """

    first: str
    then: str
    sentences: int = 0
    chunks_back: int = 1
    inserted: bool = False
    missing: Literal["first", "then"] | None = None


Piece = Anywhere | InOrder | AcrossCut | Together | Apart


def sentences(piece: Piece) -> tuple[str, ...]:
    """Return all sentences of a piece, in order."""
    match piece:
        case Anywhere(text):
            return (text,)
        case AcrossCut(first, then) | Apart(first, then):
            return (first, then)
        case InOrder(texts) | Together(texts):
            return texts


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what its answer has to contain.

    Attributes:
        task: the task of the question; helper questions of training have names of their own.
        text: the question as a user would ask it.
        answers: the values, in the order of a full answer.
        reply: the full answer, as the reference model learns to write it.
    """

    task: str
    text: str
    answers: tuple[str, ...]
    reply: str


@dataclass(slots=True)
class Draft:
    """One task's share of a document; evaluation asks the first question."""

    pieces: list[Piece] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    refers: dict[str, str] = field(default_factory=dict)
    """For a sentence that needs an earlier one to be understood: the word to which it leads."""
    belongs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For a sentence with something that is found by its name: the thing and the name."""
    placement: str = ""
    """Where the sentence that the question is about stands, for tasks that draw it."""

    def ask(self, task: str, text: str, *answers: str, reply: str | None = None) -> None:
        """Add a question; the reply defaults to the values, separated by commas."""
        self.questions.append(Question(task, text, answers, ", ".join(answers) if reply is None else reply))


Related = Callable[[str, str], Piece]
"""Returns the piece that two sentences make of which the second needs the first."""


class Task(NamedTuple):
    """A task of `kvweave eval`: its name, the name of its metric, and what writes one document of it."""

    name: str
    metric: str
    write: Callable[[World], Draft]
