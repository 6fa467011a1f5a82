"""Pieces and haystack become chunks: who stands where, and how much natural text stands between.

Knows neither tasks nor models; token counts come from the caller.
"""

import random
from collections.abc import Callable, Sequence

from kvweave.errors import InvalidRequest
from kvweave.evaluation.draft import AcrossCut, Anywhere, InOrder, Piece, Together
from kvweave.evaluation.haystack import Haystack

CountTokens = Callable[[str], int]

# How often a haystack sentence stands beside the cut, between two sentences that belong together.
_SEPARATION = 0.35
_ATTEMPTS = (
    20  # an early piece, or a long haystack sentence, may by chance take the only place of a later one
)


class Layout:
    """Chunks under construction.

    Args:
        rng: the source of every choice.
        budgets: tokens that each chunk may have.
        count: token count of a sentence.
        haystack: natural sentences to fill up with; None leaves chunks as the pieces made them.
    """

    def __init__(
        self, rng: random.Random, budgets: Sequence[int], count: CountTokens, haystack: Haystack | None
    ) -> None:
        self._rng = rng
        self._count = count
        self._haystack = haystack
        self._room = list(budgets)
        self._heads: list[list[str]] = [[] for _ in budgets]
        self._tails: list[list[str]] = [[] for _ in budgets]
        self._inside: list[list[tuple[float, str]]] = [[] for _ in budgets]

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

    def chunks(self) -> list[str]:
        """The finished text of every chunk."""
        return [self._finish(number) for number in range(len(self._room))]

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
        before, after = [first], [then]
        if self._haystack is not None and self._rng.random() < _SEPARATION:
            side = self._rng.random() < 0.5
            (before if side else after).insert(len(before) if side else 0, self._haystack.sentence(self._rng))
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

    def _finish(self, number: int) -> str:
        inside = [text for _, text in sorted(self._inside[number])]
        natural: list[str] = []
        if self._haystack is not None:
            natural = self._haystack.passage(self._rng, self._room[number], self._count)
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
    budgets: Sequence[int],
    count: CountTokens,
    haystack: Haystack | None,
) -> list[str]:
    """Chunk texts that hold every piece; what ties sentences together is placed first.

    Raises InvalidRequest when the context is too short for the pieces.
    """
    for _ in range(_ATTEMPTS):
        layout = Layout(rng, budgets, count, haystack)
        if layout.place_all(pieces):
            return layout.chunks()
    raise InvalidRequest(
        f"{len(budgets)} chunks of about {max(budgets)} tokens have no room for the task's {len(pieces)} pieces of"
        " text, or too few ends between them; take a longer context or chunks of another size"
    )


def _freedom(piece: Piece) -> int:
    return (AcrossCut, InOrder, Together, Anywhere).index(type(piece))
