"""Tells the language of a text by its most frequent words. Does not know what the text is for."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Final

ENGLISH: Final = "english"


@cache
def function_words() -> Mapping[str, frozenset[str]]:
    """Return the function words of each language that is known, in lower case."""
    text = (resources.files("kvweave") / "function_words.toml").read_text("utf-8")
    return {language: frozenset(words.split()) for language, words in tomllib.loads(text).items()}


def function_word_counts(words: Iterable[str]) -> Mapping[str, int]:
    """Return how many of these words in lower case are function words, for each language in which some are."""
    known = _languages_by_word()
    counts: Counter[str] = Counter()
    for word in words:
        counts.update(known.get(word, ()))
    return counts


def language_of(words: Iterable[str]) -> str | None:
    """Return the language with most function words among these, English first among equals; None without any."""
    counts = function_word_counts(words)
    return max(counts, key=lambda language: (counts[language], language == ENGLISH), default=None)


@cache
def _languages_by_word() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for language, words in function_words().items():
        for word in words:
            found[word] = (*found.get(word, ()), language)
    return found
