"""What a task wants in a document, before anyone decided where: pieces and the questions about them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Anywhere:
    """A sentence that may stand in any chunk."""

    text: str


@dataclass(frozen=True, slots=True)
class InOrder:
    """Sentences that stand in this order, each in a chunk of its own where there are enough chunks."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AcrossCut:
    """Two sentences in a row with the end of a chunk between them; `first` is needed to understand `then`."""

    first: str
    then: str


@dataclass(frozen=True, slots=True)
class Together:
    """Sentences that follow each other inside one chunk."""

    texts: tuple[str, ...]


Piece = Anywhere | InOrder | AcrossCut | Together


def sentences(piece: Piece) -> tuple[str, ...]:
    """All that a piece says, in its order."""
    match piece:
        case Anywhere(text):
            return (text,)
        case AcrossCut(first, then):
            return (first, then)
        case InOrder(texts) | Together(texts):
            return texts


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what its answer has to contain.

    Attributes:
        task: the task that asked it; helper questions of training have names of their own.
        text: the question as a user would ask it.
        answers: the values, in the order in which a full answer gives them.
        reply: the answer in full, as the reference model learns to write it.
    """

    task: str
    text: str
    answers: tuple[str, ...]
    reply: str


@dataclass(slots=True)
class Draft:
    """One task's share of a document; the first question is the one that evaluation asks."""

    pieces: list[Piece] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    refers: dict[str, str] = field(default_factory=dict)
    """For a sentence that says something only together with an earlier one: the word that it leads to."""
    belongs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For a sentence in which something stands that is found by its name: the thing and the name."""

    def ask(self, task: str, text: str, *answers: str, reply: str | None = None) -> None:
        """Add a question; the reply defaults to the values, separated by commas."""
        self.questions.append(Question(task, text, answers, ", ".join(answers) if reply is None else reply))
