"""Generated documents: a task's draft of facts and questions, and its layout in chunks among natural text.

Knows neither tasks nor models; token counts come from the caller.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.world import Passages, World


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


Piece = Anywhere | InOrder | AcrossCut | Together


def sentences(piece: Piece) -> tuple[str, ...]:
    """Return all sentences of a piece, in order."""
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

    def ask(self, task: str, text: str, *answers: str, reply: str | None = None) -> None:
        """Add a question; the reply defaults to the values, separated by commas."""
        self.questions.append(Question(task, text, answers, ", ".join(answers) if reply is None else reply))


class Task(NamedTuple):
    """A task of `kvweave eval`: its name, the name of its metric, and what writes one document of it."""

    name: str
    metric: str
    write: Callable[[World], Draft]


CountTokens = Callable[[str], int]

AroundCut = Callable[[str, str], tuple[list[str], list[str]]]
"""Returns the sentences before and after a cut, given the two sentences that it separates."""

_SMALLEST = 0.75  # minimum share of the largest chunk's tokens in the smallest chunk
_ATTEMPTS = 20  # an early piece may by chance take the only place of a later one
_LACKING = 0.05  # share of its length that a context may lack, since sentences are whole


class GeneratedChunk(NamedTuple):
    """A finished chunk, and whether it continues the document of the chunk before it."""

    text: str
    continues: bool


def lay_out(
    rng: random.Random,
    pieces: Sequence[Piece],
    context_tokens: int,
    chunk_tokens: int,
    count: CountTokens,
    haystack: Sequence[str],
) -> list[GeneratedChunk]:
    """Return chunks of at most `chunk_tokens`, together nearly `context_tokens`, that contain every piece.

    Pieces tied to a cut or an order are placed first; sentences of the haystack fill the rest. The number of chunks
    is what the pieces need, or more if the length needs more when it is filled with whole sentences.

    Raises InvalidRequest if the context is too short for the pieces, or the sentences are too long for its chunks.
    """
    usual = chunk_tokens * (1 + _SMALLEST) / 2
    chunks = max(
        _fewest_chunks(pieces), math.ceil(context_tokens / chunk_tokens), round(context_tokens / usual)
    )
    most = 2 * chunks  # whole sentences fill at least half a chunk
    fitting = [text for text in haystack if count(text) <= chunk_tokens]
    lacking = 0
    for _ in range(_ATTEMPTS):
        layout = Layout(rng, [chunk_tokens] * chunks, count)
        if not layout.place_all(pieces):
            continue
        passages = Passages(rng, fitting, count)
        natural, lacking = _fill(rng, layout.room, context_tokens, chunk_tokens, passages)
        if 0 <= lacking <= context_tokens * _LACKING:
            finished = map(GeneratedChunk, layout.chunks(natural), layout.continuing)
            return [chunk for chunk in finished if chunk.text]
        chunks = min(most, chunks + math.ceil(chunks * max(0, lacking) / context_tokens))
    lengths = f"chunks of at most {chunk_tokens} tokens, {context_tokens} in all,"
    if lacking > 0:
        raise InvalidRequest(
            f"the haystack's sentences are too long for {lengths} and leave {lacking} of them empty; take larger chunks"
            " or another haystack"
        )
    raise InvalidRequest(
        f"{lengths} have no room for the task's {len(pieces)} pieces of text; take a longer context or chunks of"
        " another size"
    )


def _fewest_chunks(pieces: Sequence[Piece]) -> int:
    """Return how many chunks all cuts need, or the longest order with a chunk per sentence."""
    cuts = sum(isinstance(piece, AcrossCut) for piece in pieces)
    return max([cuts + 1, *(len(piece.texts) for piece in pieces if isinstance(piece, InOrder))])


def _fill(
    rng: random.Random, room: Sequence[int], context_tokens: int, chunk_tokens: int, passages: Passages
) -> tuple[list[list[str]], int]:
    """Return natural sentences for every chunk, and the tokens that the context then lacks.

    The tokens are negative if the pieces are too long. The next chunks make up for what whole sentences leave a chunk
    short of its share.
    """
    shares = [rng.uniform(_SMALLEST, 1) for _ in room]
    lacking = context_tokens - sum(chunk_tokens - free for free in room)
    due = 0.0
    filled = []
    for share, free in zip(shares, room, strict=True):
        due += context_tokens * share / sum(shares) - (chunk_tokens - free)
        texts, drawn = passages.draw(min(free, round(due), lacking))
        filled.append(texts)
        due, lacking = due - drawn, lacking - drawn
    return filled, lacking


class Layout:
    """Chunks under construction.

    Args:
        rng: the source of every choice.
        budgets: the most tokens of each chunk.
        count: returns the token count of a sentence.
        around_cut: returns the text around a cut; by default the two sentences and nothing else.
    """

    def __init__(
        self,
        rng: random.Random,
        budgets: Sequence[int],
        count: CountTokens,
        around_cut: AroundCut = lambda first, then: ([first], [then]),
    ) -> None:
        self._rng = rng
        self._count = count
        self._around_cut = around_cut
        self._room = list(budgets)
        self._heads: list[list[str]] = [[] for _ in budgets]
        self._tails: list[list[str]] = [[] for _ in budgets]
        self._inside: list[list[tuple[float, str]]] = [[] for _ in budgets]

    @property
    def room(self) -> Sequence[int]:
        """The tokens left in every chunk."""
        return self._room

    @property
    def continuing(self) -> list[bool]:
        """For every chunk, whether it continues the document of the chunk before it."""
        return [bool(head) for head in self._heads]

    def place(self, piece: Piece) -> bool:
        """Find a place for a piece; return False, with nothing changed, if no chunk has room for it."""
        match piece:
            case Anywhere(text):
                return self._place_together((text,))
            case Together(texts):
                return self._place_together(texts)
            case InOrder(texts):
                return self._place_in_order(texts)
            case AcrossCut(first, then):
                return self._place_across(first, then)

    def place_all(self, pieces: Sequence[Piece]) -> bool:
        """Place pieces, those tied to a cut or an order first; return False if one of them found no room."""
        return all(self.place(piece) for piece in sorted(pieces, key=_freedom))

    def chunks(self, natural: Iterable[Sequence[str]]) -> list[str]:
        """Return the text of every chunk: its pieces among its natural sentences, which keep their order."""
        return [
            self._finish(number, sentences)
            for number, sentences in zip(range(len(self._room)), natural, strict=True)
        ]

    def _fitting(self, tokens: int) -> list[int]:
        return [number for number, room in enumerate(self._room) if room >= tokens]

    def _put(self, number: int, at: float, texts: Sequence[str]) -> None:
        self._inside[number].append((at, " ".join(texts)))
        self._room[number] -= self._tokens(texts)

    def _tokens(self, texts: Sequence[str]) -> int:
        return sum(self._count(text) for text in texts)

    def _place_together(self, texts: Sequence[str]) -> bool:
        fitting = self._fitting(self._tokens(texts))
        if not fitting:
            return False
        self._put(self._rng.choice(fitting), self._rng.random(), texts)
        return True

    def _place_in_order(self, texts: Sequence[str]) -> bool:
        longest = max(self._count(text) for text in texts)
        fitting = self._fitting(longest)
        if len(fitting) >= len(texts):
            chosen = sorted(self._rng.sample(fitting, len(texts)))
        else:  # too few chunks: some hold several, still in order
            fitting = self._fitting(longest * len(texts))
            if not fitting:
                return False
            chosen = sorted(self._rng.choices(fitting, k=len(texts)))
        for number, at, text in zip(chosen, sorted(self._rng.random() for _ in texts), texts, strict=True):
            self._put(number, at, (text,))
        return True

    def _place_across(self, first: str, then: str) -> bool:
        before, after = self._around_cut(first, then)
        cuts = [
            cut
            for cut in range(len(self._room) - 1)
            if not self._tails[cut]
            and not self._heads[cut + 1]
            and self._room[cut] >= self._tokens(before)
            and self._room[cut + 1] >= self._tokens(after)
        ]
        if not cuts:
            return False
        cut = self._rng.choice(cuts)
        self._tails[cut], self._heads[cut + 1] = before, after
        self._room[cut] -= self._tokens(before)
        self._room[cut + 1] -= self._tokens(after)
        return True

    def _finish(self, number: int, natural: Sequence[str]) -> str:
        inside = [text for _, text in sorted(self._inside[number])]
        slots = sorted(self._rng.randint(0, len(natural)) for _ in inside)
        middle: list[str] = []
        taken = 0
        for slot, text in zip(slots, inside, strict=True):
            middle += [*natural[taken:slot], text]
            taken = slot
        return " ".join([*self._heads[number], *middle, *natural[taken:], *self._tails[number]])


def _freedom(piece: Piece) -> int:
    return (AcrossCut, InOrder, Together, Anywhere).index(type(piece))
