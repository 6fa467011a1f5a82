"""Tells which kind of typing error makes one word of another, and which words a mistyped one may be meant for."""

from functools import lru_cache
from typing import Final

from kvweave.answer_cache.english.general_words import general_words
from kvweave.answer_cache.english.related_words import related_words
from kvweave.answer_cache.english.spelling import (
    NUMBERS_AND_DATES,
    edits,
    is_swapped,
    one_letter_away,
    swaps,
    words_of_grammar,
)

SWAPPED, OMITTED, NEIGHBOUR, OTHER, TWO = range(1, 6)
"""Kinds of errors, the likeliest first: letters swapped or doubled; one left out; a key or a vowel for another, or a key more; any
other letter; two errors."""

LEAST_LETTERS: Final = {SWAPPED: 4, OMITTED: 4, NEIGHBOUR: 4, OTHER: 4, TWO: 8}
"""Of the word that is meant, by the kind of error."""

SHORT: Final = 3  # letters of a function word, and of a word with two letters swapped or with one doubled
_ANAGRAM: Final = 6  # letters of a word in which two pairs may be swapped

_KEYS: Final = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_ALIKE: Final = ("aeiouy", "ck", "cs", "sz", "gj", "iy")
"""Letters that are taken for each other because they sound alike."""


def kind_of(typed: str, meant: str) -> int | None:
    """Return the likeliest kind of error that makes one word of another; None if there is none, or the word is too short for it."""
    kind = kind_of_any(typed, meant)
    if kind is None:
        return None
    least = LEAST_LETTERS[kind]
    grammatical = meant in words_of_grammar()
    if kind == SWAPPED and len(typed) > len(meant):
        least = SHORT - grammatical
    elif (kind == SWAPPED and len(typed) == len(meant)) or (kind <= NEIGHBOUR and grammatical):
        least = SHORT
    elif kind == TWO and typed[0] == meant[0] and sorted(typed) == sorted(meant):
        least = _ANAGRAM
    return kind if min(len(meant), len(typed) + 1) >= least else None


def kind_of_any(typed: str, meant: str) -> int | None:
    """Return the same for words of any length."""
    if is_swapped(typed, meant):
        return SWAPPED
    if abs(len(typed) - len(meant)) == 1 and _undoubled(typed) == _undoubled(meant):
        return SWAPPED
    if abs(len(typed) - len(meant)) > 2:
        return None
    distance = edits(typed, meant, 2)
    if distance == 2 and typed[0] == meant[0]:
        return TWO
    if distance != 1:
        return None
    at = next(
        (n for n, (one, two) in enumerate(zip(typed, meant, strict=False)) if one != two),
        min(len(typed), len(meant)),
    )
    if len(typed) < len(meant):
        return OMITTED if at else NEIGHBOUR
    if len(typed) == len(meant):
        return NEIGHBOUR if at and _are_near(typed[at], meant[at]) else OTHER
    if typed[at:] == "es" and meant.endswith("s"):
        return OMITTED  # "lookes" follows the rule of other verbs
    beside = typed[max(0, at - 1) : at] + typed[at + 1 : at + 2]
    return NEIGHBOUR if at and any(_are_near(typed[at], letter) for letter in beside) else OTHER


@lru_cache(maxsize=64)
def words_near(typed: str, kind: int) -> frozenset[str]:
    """Return the words that a word may be an error of, for errors up to a kind; of two errors only frequent words."""
    known = general_words()
    found = {
        word
        for word in swaps(typed) | one_letter_away(typed)
        if word in known.common or word in known.forms or is_usual(word)
    }
    if kind == TWO:
        third = max(1, len(typed) // 3)
        parts = (typed[:third], typed[third : 2 * third], typed[2 * third :])
        usual = related_words().often | words_of_grammar() | NUMBERS_AND_DATES
        near = (
            word for word in usual if abs(len(word) - len(typed)) <= 2 and any(part in word for part in parts)
        )
        found |= {word for word in near if edits(typed, word, 2) <= 2}
    return frozenset(found - {typed})


def is_usual(word: str) -> bool:
    """Return whether texts have a word often."""
    return word in words_of_grammar() or word in NUMBERS_AND_DATES or related_words().is_frequent(word)


def _undoubled(word: str) -> str:
    return "".join(letter for n, letter in enumerate(word) if not n or letter != word[n - 1])


@lru_cache(maxsize=1024)
def _are_near(one: str, other: str) -> bool:
    """Return whether two letters have keys beside each other, or sound alike."""
    if any(one in letters and other in letters for letters in _ALIKE):
        return True
    places = [
        (row, keys.index(letter))
        for letter in (one, other)
        for row, keys in enumerate(_KEYS)
        if letter in keys
    ]
    if len(places) < 2:
        return False
    (row, column), (below, place) = sorted(places)
    return abs(column - place) <= 1 if row == below else below == row + 1 and column - place in (0, 1)
