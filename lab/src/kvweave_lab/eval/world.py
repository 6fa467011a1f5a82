"""What generated documents draw from: names, values, phrases and natural text, in four disjoint splits.

Names and values are disjoint *as* names and values, and so are phrases and the sentences of the haystacks: no split
draws, says or shows what another one does. A hash of their text assigns names, numbers and nouns to a split; phrases
and haystacks belong where they are listed.

Words as such are not disjoint. A noun that is a value of `test` may occur in a haystack or a phrase of `train` like
any other word, and names have the same syllables everywhere, in combinations of their own split.

No training or tuning run draws from `hidden`. Knows nothing about tasks, chunks or models.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import xxhash

from kvweave.errors import InvalidRequest

TRAIN, DEV, TEST, HIDDEN = SPLITS = ("train", "dev", "test", "hidden")

Phrases = Mapping[str, tuple[str, ...]]
"""Sentences with {placeholders}, by split; no sentence is in two splits."""

_SHARES: Final = {TRAIN: 55, DEV: 15, TEST: 15, HIDDEN: 15}  # percent
_CHOICE: Final = re.compile(r"\[([^\]]*)\]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?][\"')])\s+|(?<=[.!?])\s+")
_WORD: Final = re.compile(r"\w+")


def split_of(text: str) -> str:
    """Return the one split to which a generated name or value belongs."""
    point = xxhash.xxh64_intdigest(text.lower().encode()) % 100
    for split, share in _SHARES.items():
        point -= share
        if point < 0:
            return split
    raise AssertionError("the shares add up to 100")


@cache
def nouns(split: str) -> tuple[str, ...]:
    """Return everyday things of one split, one word each, in the order of the list."""
    listed = (resources.files(__package__) / "data" / "nouns.txt").read_text("utf-8").split()
    return tuple(word for word in listed if split_of(word) == split)


def variants(*texts: str) -> tuple[str, ...]:
    """Return the sentences with every choice made: "[a|b] c" stands for "a c" and "b c"."""
    sentences: list[str] = []
    for text in texts:
        parts = _CHOICE.split(text)  # plain text and choices in turn
        choices = [part.split("|") if number % 2 else [part] for number, part in enumerate(parts)]
        sentences += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(sentences)


def chosen(rng: random.Random, text: str) -> str:
    """Return one of the sentences that `variants` makes of a text."""
    return _CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text)


class World:
    """People, places and things for one document, drawn from one split; nothing is drawn twice.

    Args:
        rng: the source of every choice; two worlds with equal generators are equal.
        split: train, dev, test or hidden.
        words: further one-word values besides the split's nouns, for instance those of a training text.
    """

    def __init__(self, rng: random.Random, split: str, words: Sequence[str] = ()) -> None:
        self.rng = rng
        self.split = split
        self._nouns = nouns(split)
        self._words = words
        self._drawn: set[str] = set()

    @property
    def drawn(self) -> Set[str]:
        """Every name and value drawn until now."""
        return self._drawn

    def person(self) -> str:
        """Draw a name of one word: Brenek, Toulia."""
        return self._draw_new(lambda: self._composed(ENDINGS))

    def town(self) -> str:
        """Draw a place name of one word: Skeltford."""
        return self._draw_new(lambda: self._composed(TOWNS))

    def name(self) -> str:
        """Draw a person or a town."""
        return self.person() if self.rng.random() < 0.7 else self.town()

    def thing(self) -> str:
        """Draw a word for something: lantern."""
        if self._words and self.rng.random() < 0.6:
            return self._draw_new(lambda: self.rng.choice(self._words), any_split=True)
        return self._draw_new(lambda: self.rng.choice(self._nouns))

    def number(self, digits: int) -> str:
        """Draw a number of exactly `digits` digits that does not start with 0."""
        return self._draw_new(lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))

    def uuid(self) -> str:
        """Draw a UUID in its usual form, 8-4-4-4-12 hexadecimal digits."""

        def draw() -> str:
            digits = f"{self.rng.getrandbits(128):032x}"
            return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

        return self._draw_new(draw)

    def phrase(self, phrases: Phrases) -> str:
        """Choose one of the split's sentences, its placeholders unfilled."""
        return self.rng.choice(phrases[self.split])

    def _composed(self, endings: Sequence[str]) -> str:
        return (self.rng.choice(starts()) + self.rng.choice(endings)).capitalize()

    def _draw_new(self, draw: Callable[[], str], *, any_split: bool = False) -> str:
        """Draw until the text is new in this document and, unless `any_split`, belongs to the split."""
        for _ in range(1000):
            text = draw()
            if text not in self._drawn and (any_split or split_of(text) == self.split):
                self._drawn.add(text)
                return text
        raise AssertionError("a pool is too small for one document")


_ONSETS = (
    "b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sn st str t th tr v w y z".split()
)
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = "b d g k l ld lm lt m n nd nt p r rd rk rn s sk st th v x".split()
_START_COUNT = 600
ENDINGS = (
    "nek lia dor mas ric vin tha bel ron sa dra gan mir lo fa tus na ven rik sel wyn zo bert cia dan fer gus"
    " han jo ko len mon nis pa rus sin ta vic yan zel"
).split()
TOWNS = "ford burg ton mere wick holm dale stad ville port haven field".split()


@cache
def starts() -> tuple[str, ...]:
    """Return the first syllables of names, the same in every split: only their combination with an ending is new."""
    syllables = ("".join(parts) for parts in itertools.product(_ONSETS, _VOWELS, _CODAS))
    return tuple(sorted(syllables, key=lambda text: xxhash.xxh64_intdigest(text.encode()))[:_START_COUNT])


class Haystack:
    """Sentences of natural documents, in their order, in which facts are hidden.

    Args:
        documents: the text of each document; sentences end at full stops.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        cut = [[part.strip() for part in _SENTENCE_END.split(text) if part.strip()] for text in documents]
        self._documents = [sentences for sentences in cut if sentences]
        if not self._documents:
            raise InvalidRequest("the haystack holds no text; name a folder with text files")
        self._words = {text: _words(text) for sentences in self._documents for text in sentences}

    @classmethod
    def of_split(cls, split: str) -> "Haystack":
        """Return the documents that ship with the lab for `dev`, `test` or `hidden`."""
        if split not in (DEV, TEST, HIDDEN):
            raise InvalidRequest(
                f"no haystack ships for the split {split!r}; choose dev, test or hidden, or name a folder with --haystack"
            )
        folder = resources.files(__package__) / "data" / "haystack" / split
        files = sorted(folder.iterdir(), key=lambda entry: entry.name)
        return cls([entry.read_text("utf-8") for entry in files])

    @classmethod
    def of_folder(cls, folder: Path) -> "Haystack":
        """Return every .txt and .md file below a folder."""
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is not a folder; --haystack takes a folder of .txt or .md files")
        files = sorted(
            path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file()
        )
        return cls([path.read_text("utf-8", errors="replace") for path in files])

    def sentences(self) -> Sequence[Sequence[str]]:
        """Return the sentences of every document, in order."""
        return self._documents

    def without(self, texts: Iterable[str]) -> list[str]:
        """Return every different sentence, in order, that shares no word with these texts; case does not count."""
        taken = {word for text in texts for word in _words(text)}
        return [sentence for sentence, words in self._words.items() if words.isdisjoint(taken)]


class Passages:
    """Natural text for the chunks of one prompt: no sentence is repeated while another one fits in its place.

    Args:
        rng: the source of every choice.
        sentences: different ones, in reading order.
        count: returns the token count of a sentence.
    """

    def __init__(self, rng: random.Random, sentences: Sequence[str], count: Callable[[str], int]) -> None:
        self._rng = rng
        self._all = [(text, count(text)) for text in sentences]
        self._left = self._all
        self._least_tokens = min((tokens for _, tokens in self._all), default=0)
        self._mean_tokens = sum(tokens for _, tokens in self._all) / max(1, len(self._all))

    def draw(self, tokens: int) -> tuple[list[str], int]:
        """Return as many sentences as fit into `tokens` tokens, from a random place on, and their token count.

        Sentences that do not fit are skipped.
        """
        texts: list[str] = []
        left = tokens
        while some := self._fitting(left) or self._fitting_again(left):
            taken = set(some)
            self._left = [sentence for sentence in self._left if sentence not in taken]
            texts += [text for text, _ in some]
            left -= sum(size for _, size in some)
        return texts, tokens - left

    def _fitting(self, tokens: int) -> list[tuple[str, int]]:
        start = self._rng.randrange(len(self._left)) if self._left else 0
        some = []
        for number in range(start, start + len(self._left)):
            if tokens < self._least_tokens:
                break
            sentence = self._left[number % len(self._left)]
            if sentence[1] <= tokens:
                some.append(sentence)
                tokens -= sentence[1]
        return some

    def _fitting_again(self, tokens: int) -> list[tuple[str, int]]:
        """Return sentences out of all of them again, unless the room left is less than a usual sentence."""
        if tokens < self._mean_tokens:
            return []
        self._left = self._all
        return self._fitting(tokens)


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))
