"""The layout of a document's pieces in chunks among natural text.

Knows neither tasks nor models; token counts come from the caller.
"""

import functools
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import pairwise
from typing import Final, NamedTuple

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.documents import AcrossCut, Anywhere, Apart, InOrder, Piece, Together
from kvweave_lab.eval.world import Passages

CountTokens = Callable[[str], int]

AroundCut = Callable[[str, str], tuple[list[str], list[str]]]
"""Returns the sentences before and after a cut, given the two sentences that it separates."""

_SMALLEST = 0.75  # minimum share of the largest chunk's tokens in the smallest chunk
_ATTEMPTS = 20  # an early piece may by chance take the only place of a later one
_LACKING = 0.05  # share of its length that a context may lack, since sentences are whole
_SHORT = (
    6  # sentences between a cut and what refers back take a chunk's tokens by this, so that four of them fit
)
_FEWEST_SHORT = 12  # and these are at least so many, the shortest
_PERSON: Final = re.compile(r"\b(?:he|she|him|her|hers|his|himself|herself)\b", re.IGNORECASE)
_NAME: Final = re.compile(r"(?<=.)\b(?!I\b)[A-Z]")


class GeneratedChunk(NamedTuple):
    """A finished chunk.

    Attributes:
        text: its text.
        continues: whether it continues the document of the chunk before it.
        document: the number of its document, and its place there.
        retrieved: whether it is in the prompt; the others come last.
    """

    text: str
    continues: bool
    document: tuple[int, int]
    retrieved: bool = True


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
    is what the pieces need, or more if the length needs more when it is filled with whole sentences. Where a piece is `Apart`,
    sentences of the haystack that name or mention people are left out, so that nothing else can be meant.

    Raises InvalidRequest if the context is too short for the pieces, or the sentences are too long for its chunks.
    """
    usual = chunk_tokens * (1 + _SMALLEST) / 2
    chunks = max(
        _fewest_chunks(pieces), math.ceil(context_tokens / chunk_tokens), round(context_tokens / usual)
    )
    most = 2 * chunks  # whole sentences fill at least half a chunk
    apart = any(isinstance(piece, Apart) for piece in pieces)
    fitting = [
        text for text in haystack if count(text) <= chunk_tokens and not (apart and names_people(text))
    ]
    between = _short(fitting, chunk_tokens, count) if apart else []
    lacking = 0
    for _ in range(_ATTEMPTS):
        layout = Layout(rng, [chunk_tokens] * chunks, count, between=between)
        if not layout.place_all(pieces):
            continue
        taken = layout.taken
        passages = Passages(rng, [text for text in fitting if text not in taken], count)
        natural, lacking = _fill(rng, layout.room, context_tokens, chunk_tokens, passages)
        if 0 <= lacking <= context_tokens * _LACKING:
            return layout.finished(natural, passages, chunk_tokens)
        chunks = min(most, chunks + math.ceil(chunks * max(0, lacking) / context_tokens))
    raise _no_room(pieces, context_tokens, chunk_tokens, lacking)


def _no_room(pieces: Sequence[Piece], context_tokens: int, chunk_tokens: int, lacking: int) -> InvalidRequest:
    """Return the error for what does not fit: sentences that leave tokens empty, or else the pieces."""
    lengths = f"chunks of at most {chunk_tokens} tokens, {context_tokens} in all,"
    if lacking > 0:
        return InvalidRequest(
            f"the haystack's sentences are too long for {lengths} and leave {lacking} of them empty; take larger chunks"
            " or another haystack"
        )
    return InvalidRequest(
        f"{lengths} have no room for the task's {len(pieces)} pieces of text; take a longer context or chunks of"
        " another size"
    )


@functools.cache  # a haystack's sentences come again with every sample
def names_people(sentence: str) -> bool:
    """Return whether a sentence mentions a person, or has a name after its first word."""
    return bool(_PERSON.search(sentence) or _NAME.search(sentence))


def _short(sentences: Sequence[str], chunk_tokens: int, count: CountTokens) -> list[str]:
    """Return the sentences that stand between a cut and what refers back, in their order."""
    sizes = sorted(map(count, sentences))
    bound = max([chunk_tokens // _SHORT, *sizes[_FEWEST_SHORT - 1 : _FEWEST_SHORT]])
    return [text for text in sentences if count(text) <= bound]


def _fewest_chunks(pieces: Sequence[Piece]) -> int:
    """Return how many chunks all cuts need, or the longest order with a chunk per sentence."""
    cuts = sum(
        piece.chunks_back if isinstance(piece, Apart) else isinstance(piece, AcrossCut) for piece in pieces
    )
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
        between: natural sentences that may stand between a cut and what refers back.
    """

    def __init__(
        self,
        rng: random.Random,
        budgets: Sequence[int],
        count: CountTokens,
        around_cut: AroundCut = lambda first, then: ([first], [then]),
        between: Sequence[str] = (),
    ) -> None:
        self._rng = rng
        self._count = count
        self._around_cut = around_cut
        self._room = list(budgets)
        self._heads: list[list[str]] = [[] for _ in budgets]
        self._tails: list[list[str]] = [[] for _ in budgets]
        self._inside: list[list[tuple[float, str]]] = [[] for _ in budgets]
        self._between = list(between)
        self._closed: set[int] = set()  # chunks that no further piece may be in
        self._next: dict[int, int] = {}  # the next chunk of the same document
        self._missing: list[tuple[list[str], list[str]]] = []  # heads and tails; numbered after the others

    @property
    def room(self) -> Sequence[int]:
        """The tokens left in every chunk."""
        return self._room

    @property
    def continuing(self) -> list[bool]:
        """For every chunk, whether it continues the document of the chunk before it."""
        return [self._next.get(number - 1) == number for number in range(len(self._room))]

    @property
    def taken(self) -> Set[str]:
        """The natural sentences that stand between a cut and what refers back."""
        return {text for head in (*self._heads, *(head for head, _ in self._missing)) for text in head[:-1]}

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
            case Apart():
                return self._place_apart(piece)

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
        return [
            number for number, room in enumerate(self._room) if room >= tokens and number not in self._closed
        ]

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
        self._end(cut, before)
        self._begin(cut + 1, after)
        self._next[cut] = cut + 1
        return True

    def _end(self, number: int, texts: list[str]) -> None:
        self._tails[number] = texts
        self._room[number] -= self._tokens(texts)

    def _begin(self, number: int, texts: list[str]) -> None:
        self._heads[number] = texts
        self._room[number] -= self._tokens(texts)

    def _place_apart(self, piece: Apart) -> bool:
        if piece.sentences > len(self._between):
            return False
        head = [*self._rng.sample(self._between, piece.sentences), piece.then]
        spots = self._spots(piece, self._tokens([piece.first]), self._tokens(head))
        if not spots:
            return False
        before, after = self._rng.choice(spots)
        self._between = [text for text in self._between if text not in head]
        if before is None:
            before = self._miss([], [piece.first])
            self._closed.update(range(after))  # else the sentence could refer to what is named there
        else:
            self._end(before, [piece.first])
        if piece.missing == "then":
            after = self._miss(head, [])
        else:
            self._begin(after, head)
        self._join(before, after, piece)
        return True

    def _spots(self, piece: Apart, first: int, then: int) -> list[tuple[int | None, int]]:
        """Return the chunks that may end with the first sentence and begin with the other, given their tokens."""
        numbers = range(len(self._room))
        ends = {n for n in numbers if self._open(n) and not self._tails[n] and self._room[n] >= first}
        begins = {n for n in numbers if self._open(n) and not self._heads[n] and self._room[n] >= then}
        if piece.missing == "first":  # in the first half, so that the others find room after it
            half = range((len(numbers) + 1) // 2)
            return [(None, n) for n in half if n in begins and all(map(self._untouched, range(n)))]
        if piece.missing == "then":
            return [(n, n) for n in ends]
        back = piece.chunks_back
        between = {n for n in numbers if back == 1 or (n > 0 and self._untouched(n - 1))}
        return [(n - back, n) for n in sorted(begins & between) if n - back in ends]

    def _open(self, number: int) -> bool:
        return number not in self._closed

    def _untouched(self, number: int) -> bool:
        return self._open(number) and not (self._heads[number] or self._tails[number] or self._inside[number])

    def _miss(self, head: list[str], tail: list[str]) -> int:
        """Add a chunk that is not in the prompt; return its number."""
        self._missing.append((head, tail))
        return len(self._room) + len(self._missing) - 1

    def _join(self, before: int, after: int, piece: Apart) -> None:
        """Put two chunks into one document, and the chunk between them too if it is not of another."""
        middle = [after - 1] if piece.chunks_back == 2 and piece.missing is None else []
        self._closed.update(middle)
        path = [before, *([] if piece.inserted else middle), after]
        self._next.update(pairwise(path))

    def finished(
        self, natural: Iterable[Sequence[str]], passages: Passages, chunk_tokens: int
    ) -> list[GeneratedChunk]:
        """Return all chunks that have text, those that are not in the prompt after the others."""
        texts = self.chunks(natural)
        for head, tail in self._missing:
            room = chunk_tokens - self._tokens([*head, *tail])
            texts.append(" ".join([*head, *passages.draw(round(room * _SMALLEST))[0], *tail]))
        shown = len(self._room)
        rows = zip(texts, [*self.continuing, *(False for _ in self._missing)], self._documents(), strict=True)
        return [
            GeneratedChunk(text, continues, document, number < shown)
            for number, (text, continues, document) in enumerate(rows)
            if text
        ]

    def _documents(self) -> list[tuple[int, int]]:
        """Return the number of every chunk's document, and the chunk's place in it."""
        chunks = range(len(self._room) + len(self._missing))
        found = {}
        for document, first in enumerate(sorted(set(chunks) - set(self._next.values()))):
            place, number = 0, first
            while True:
                found[number] = (document, place)
                if number not in self._next:
                    break
                place, number = place + 1, self._next[number]
        return [found[number] for number in chunks]

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
    if isinstance(piece, Apart) and piece.missing == "first":
        return 0
    return 1 + (Apart, AcrossCut, InOrder, Together, Anywhere).index(type(piece))
