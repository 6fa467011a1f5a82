"""Pieces and haystack become chunks: who stands where, and how much natural text stands between.

Knows neither tasks nor models; token counts come from the caller.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.draft import AcrossCut, Anywhere, InOrder, Piece, Together
from kvweave_lab.eval.haystack import Passages

CountTokens = Callable[[str], int]

AroundCut = Callable[[str, str], tuple[list[str], list[str]]]
"""From two sentences that a cut lies between to what stands before and what behind it."""

_SMALLEST = 0.75  # the smallest chunk is to have this share of the largest one's tokens
_ATTEMPTS = 20  # an early piece may by chance take the only place of a later one
_LACKING = 0.05  # how much of its length a context may lack, since sentences are whole


class Laid(NamedTuple):
    """A finished chunk, and whether it goes on where the one before was cut; else it is from another document."""

    text: str
    continues: bool


class Layout:
    """Chunks under construction.

    Args:
        rng: the source of every choice.
        budgets: tokens that each chunk may have.
        count: token count of a sentence.
        around_cut: what stands around a cut; as a rule the two sentences and nothing else.
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
        """Tokens that every chunk has left."""
        return self._room

    @property
    def continuing(self) -> list[bool]:
        """For every chunk whether it goes on where the one before was cut."""
        return [bool(head) for head in self._heads]

    def place(self, piece: Piece) -> bool:
        """Find a place for a piece; False, and nothing changed, if no chunk has room for it."""
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
        """Place pieces that belong together, those tied to a cut or an order first; False if one found no room."""
        return all(self.place(piece) for piece in sorted(pieces, key=_freedom))

    def chunks(self, natural: Iterable[Sequence[str]]) -> list[str]:
        """The finished text of every chunk: its pieces among its natural sentences, which keep their order."""
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


def lay_out(
    rng: random.Random,
    pieces: Sequence[Piece],
    context_tokens: int,
    chunk_tokens: int,
    count: CountTokens,
    haystack: Sequence[str],
) -> list[Laid]:
    """Chunks of at most `chunk_tokens`, together of nearly `context_tokens`, that hold every piece.

    What ties sentences together is placed first, sentences of the haystack fill up. There are as many chunks as the
    pieces need, and as many more as the length does when filled with whole sentences.

    Raises InvalidRequest when the context is too short for the pieces, or the sentences are too long for its chunks.
    """
    usual = chunk_tokens * (1 + _SMALLEST) / 2
    chunks = max(_fewest(pieces), math.ceil(context_tokens / chunk_tokens), round(context_tokens / usual))
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
            laid = map(Laid, layout.chunks(natural), layout.continuing)
            return [chunk for chunk in laid if chunk.text]
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


def _fill(
    rng: random.Random, room: Sequence[int], context_tokens: int, chunk_tokens: int, passages: Passages
) -> tuple[list[list[str]], int]:
    """Natural sentences of every chunk, and the tokens that the context then lacks; negative if pieces are too long.

    What whole sentences leave a chunk short of its share is made up for by the next ones.
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


def _fewest(pieces: Sequence[Piece]) -> int:
    """How many chunks it takes for all cuts, and for every order to have a chunk for each of its sentences."""
    cuts = sum(isinstance(piece, AcrossCut) for piece in pieces)
    return max([cuts + 1, *(len(piece.texts) for piece in pieces if isinstance(piece, InOrder))])


def _freedom(piece: Piece) -> int:
    return (AcrossCut, InOrder, Together, Anywhere).index(type(piece))
