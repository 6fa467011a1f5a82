"""Natural text that needles are hidden in: the split's own documents, or any folder of text files."""

import random
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave.evaluation.splits import DEV, HIDDEN, TEST

_SENTENCE_END = re.compile(r"(?<=[.!?][\"')])\s+|(?<=[.!?])\s+")


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

    def sentence(self, rng: random.Random) -> str:
        """Any one sentence."""
        return rng.choice(rng.choice(self._documents))

    def passage(self, rng: random.Random, tokens: int, count: Callable[[str], int]) -> list[str]:
        """Consecutive sentences of one place that together have at most `tokens` tokens."""
        sentences = rng.choice(self._documents)
        start = rng.randrange(len(sentences))
        chosen: list[str] = []
        for offset in range(len(sentences)):
            text = sentences[(start + offset) % len(sentences)]
            tokens -= count(text)
            if tokens < 0:
                if chosen or offset > 8:
                    break
                tokens += count(text)
                continue
            chosen.append(text)
        return chosen
