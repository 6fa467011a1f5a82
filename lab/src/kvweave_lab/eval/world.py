"""A world of people, places and things for one document: nothing in it is drawn twice.

Knows nothing about tasks, chunks or models.
"""

import itertools
import random
from collections.abc import Callable, Sequence, Set
from functools import cache

import xxhash

from kvweave_lab.eval.splits import Phrases, nouns, split_of

_ONSETS = (
    "b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st str t th tr v w y z".split()
)
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = "b d g k l ld lm lt m n nd nt p r rd rk rn s sk st th v x".split()
_STARTS = 600
_ENDINGS = (
    "nek lia dor mas ric vin tha bel ron sa dra gan mir lo fa tus na ven rik sel wyn zo bert cia dan fer gus"
    " han jo ko len mon nis pa rus sin ta vic yan zel"
).split()
_TOWNS = "ford burg ton mere wick holm dale stad ville port haven field".split()


@cache
def _starts() -> tuple[str, ...]:
    """First syllables of names, the same ones everywhere: it is their combination with an ending that is new."""
    syllables = ("".join(parts) for parts in itertools.product(_ONSETS, _VOWELS, _CODAS))
    return tuple(sorted(syllables, key=lambda text: xxhash.xxh64_intdigest(text.encode()))[:_STARTS])


class World:
    """Draws from the pools of one split.

    Args:
        rng: the source of every choice; two worlds with equal generators are equal.
        split: train, dev, test or hidden.
        words: further one-word values beside the split's nouns, for instance those of a training text.
    """

    def __init__(self, rng: random.Random, split: str, words: Sequence[str] = ()) -> None:
        self.rng = rng
        self.split = split
        self._nouns = nouns(split)
        self._words = words
        self._drawn: set[str] = set()

    @property
    def drawn(self) -> Set[str]:
        """Every name and value so far."""
        return self._drawn

    def person(self) -> str:
        """A name of one word: Brenek, Toulia."""
        return self._fresh(lambda: self._composed(_ENDINGS))

    def town(self) -> str:
        """A place name of one word: Skeltford."""
        return self._fresh(lambda: self._composed(_TOWNS))

    def name(self) -> str:
        """A person or a town."""
        return self.person() if self.rng.random() < 0.7 else self.town()

    def thing(self) -> str:
        """A word for something: lantern."""
        if self._words and self.rng.random() < 0.6:
            return self._fresh(lambda: self.rng.choice(self._words), sorts=False)
        return self._fresh(lambda: self.rng.choice(self._nouns))

    def number(self, digits: int) -> str:
        """A number of exactly `digits` digits that does not start with 0."""
        return self._fresh(lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))

    def uuid(self) -> str:
        """A random UUID in its usual form, 8-4-4-4-12 hexadecimal digits."""

        def draw() -> str:
            digits = f"{self.rng.getrandbits(128):032x}"
            return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

        return self._fresh(draw)

    def phrase(self, phrases: Phrases) -> str:
        """One of the split's sentences, its placeholders unfilled."""
        return self.rng.choice(phrases[self.split])

    def _composed(self, endings: Sequence[str]) -> str:
        return (self.rng.choice(_starts()) + self.rng.choice(endings)).capitalize()

    def _fresh(self, draw: Callable[[], str], *, sorts: bool = True) -> str:
        for _ in range(1000):
            text = draw()
            if text not in self._drawn and (not sorts or split_of(text) == self.split):
                self._drawn.add(text)
                return text
        raise AssertionError("a pool is too small for one document")
