"""A world of people, places and things for one document: nothing in it is drawn twice.

Knows nothing about tasks, chunks or models.
"""

import random
from collections.abc import Callable, Sequence

from kvweave.evaluation.splits import Phrases, nouns, split_of

_ONSETS = "b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st str t th tr v w y z".split()
_VOWELS = "a e i o u a e i o ai ea ou ee oo".split()
_CODAS = ["", "", "", *"b ck d ff g ld ll lm lt m mp n nd nk nt p r rd rk rn rt s sk ss st t th v x".split()]
_ENDINGS = "a en er ia in is o on or us y ek im el".split()
_TOWNS = "ford burg ton mere wick holm dale stad ville port haven field".split()


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

    def person(self) -> str:
        """A name of one word: Brenek, Toulia."""
        return self._fresh(lambda: (_syllable(self.rng) + self.rng.choice(_ONSETS) + self.rng.choice(_ENDINGS)).capitalize())

    def town(self) -> str:
        """A place name of one word: Skeltford."""
        return self._fresh(lambda: (_syllable(self.rng) + self.rng.choice(_TOWNS)).capitalize())

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

    def _fresh(self, draw: Callable[[], str], *, sorts: bool = True) -> str:
        for _ in range(1000):
            text = draw()
            if text not in self._drawn and (not sorts or split_of(text) == self.split):
                self._drawn.add(text)
                return text
        raise AssertionError("a pool is too small for one document")


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
