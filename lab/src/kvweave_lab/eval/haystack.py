"""Natural text that needles are hidden in: the split's own documents, or any folder of text files."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.splits import DEV, HIDDEN, TEST

_SENTENCE_END = re.compile(r"(?<=[.!?][\"')])\s+|(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")


class Haystack:
    """Sentences of natural documents, in their order.

    Args:
        documents: the text of each document; sentences are cut at full stops.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        cut = [[part.strip() for part in _SENTENCE_END.split(text) if part.strip()] for text in documents]
        self._documents = [sentences for sentences in cut if sentences]
        if not self._documents:
            raise InvalidRequest("the haystack holds no text; name a folder with text files")
        self._words = {text: _words(text) for sentences in self._documents for text in sentences}

    @classmethod
    def of_split(cls, split: str) -> "Haystack":
        """The documents that ship with kvweave for `dev`, `test` or `hidden`."""
        if split not in (DEV, TEST, HIDDEN):
            raise InvalidRequest(
                f"no haystack ships for the split {split!r}; choose dev, test or hidden, or name a folder with --haystack"
            )
        folder = resources.files(__package__) / "data" / "haystack" / split
        files = sorted(folder.iterdir(), key=lambda entry: entry.name)
        return cls([entry.read_text("utf-8") for entry in files])

    @classmethod
    def of_folder(cls, folder: Path) -> "Haystack":
        """Every .txt and .md file below a folder."""
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is not a folder; --haystack takes a folder of .txt or .md files")
        files = sorted(
            path for path in folder.rglob("*") if path.suffix in (".txt", ".md") and path.is_file()
        )
        return cls([path.read_text("utf-8", errors="replace") for path in files])

    def sentences(self) -> Sequence[Sequence[str]]:
        """The sentences of every document, in order."""
        return self._documents

    def without(self, texts: Iterable[str]) -> list[str]:
        """Every different sentence, in order, that has no word in common with these texts, in any case of letters."""
        taken = {word for text in texts for word in _words(text)}
        return [sentence for sentence, words in self._words.items() if words.isdisjoint(taken)]


class Passages:
    """Natural text for the chunks of one prompt: no sentence comes again while another one fits in its place.

    Args:
        rng: the source of every choice.
        sentences: different ones, in the order in which they are read.
        count: token count of a sentence.
    """

    def __init__(self, rng: random.Random, sentences: Sequence[str], count: Callable[[str], int]) -> None:
        self._rng = rng
        self._all = [(text, count(text)) for text in sentences]
        self._left = self._all
        self._usual = sum(tokens for _, tokens in self._all) / max(1, len(self._all))

    def draw(self, tokens: int) -> tuple[list[str], int]:
        """Sentences from some place on, as many as fit into `tokens` tokens, and how many tokens they have.

        Those that do not fit are passed over.
        """
        texts: list[str] = []
        left = tokens
        while some := self._fitting(left) or self._again(left):
            self._left = [sentence for sentence in self._left if sentence not in some]
            texts += [text for text, _ in some]
            left -= sum(size for _, size in some)
        return texts, tokens - left

    def _fitting(self, tokens: int) -> list[tuple[str, int]]:
        start = self._rng.randrange(len(self._left)) if self._left else 0
        some = []
        for sentence in (*self._left[start:], *self._left[:start]):
            if sentence[1] <= tokens:
                some.append(sentence)
                tokens -= sentence[1]
        return some

    def _again(self, tokens: int) -> list[tuple[str, int]]:
        """From all sentences anew, unless it is a small place that they leave empty."""
        if tokens < self._usual:
            return []
        self._left = self._all
        return self._fitting(tokens)


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))
