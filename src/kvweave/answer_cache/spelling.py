"""Kinds of typing errors, and the words that a misspelt word may stand for.

`mistyped.py` decides with these whether two questions differ only in typing errors.
"""

from functools import cache, lru_cache
from string import ascii_lowercase
from typing import Final

from kvweave.answer_cache.wordnet import general_words
from kvweave.languages import ENGLISH, function_words
from kvweave.text import FILLERS, HELPERS, NEGATIONS, NUMBERS_AND_DATES, OWNER, PREPOSITIONS

_PREFIXES: Final = ("un", "in", "im", "dis", "non", "mis", "re", "de", "pre")
SWAPPED, OMITTED, NEIGHBOUR, OTHER, TWO = range(1, 6)
"""Kinds of errors, the likeliest first: letters swapped or doubled; one left out; a key or a vowel for another, or a key more; any
other letter; two errors."""

LEAST_LETTERS, LEAST_LETTERS_OF_TWO = 4, 8
"""Of the word that is meant, with one error and with two."""

SHORT: Final = 3  # letters of a function word, and of a word with two letters swapped or with one doubled
_ANAGRAM: Final = 6  # letters of a word in which two pairs may be swapped

_KEYS: Final = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_ALIKE: Final = ("aeiouy", "ck", "cs", "sz", "gj", "iy")
"""Letters that are taken for each other because they sound alike."""


def is_word(word: str) -> bool:
    """Return whether a word in lower case is a general word, a function word or a name."""
    return word in words_of_grammar() or general_words().is_common(word) or word in general_words().names


def is_general(word: str) -> bool:
    """Return whether a word in lower case is a general word or a function word."""
    return word in words_of_grammar() or general_words().is_common(word)


def is_compound(word: str) -> bool:
    """Return whether a word in lower case consists of two frequent words and is no name: "hotline"."""
    if word in general_words().names:
        return False
    parts = ((word[:n], word[n:]) for n in range(SHORT, len(word) - SHORT + 1))
    return any(all(map(general_words().is_frequent, pair)) for pair in parts)


@cache
def words_of_grammar() -> frozenset[str]:
    """Return the function words: helping verbs, prepositions, pronouns, question words and the like."""
    return function_words()[ENGLISH].union(HELPERS, PREPOSITIONS, NEGATIONS, FILLERS, (OWNER,))


def differ_by_prefix(one: str, other: str) -> bool:
    """Return whether two words differ only in their prefix: "inactive", "reactive"."""
    stems = [
        {word, *(word.removeprefix(prefix) for prefix in _PREFIXES if word.startswith(prefix))}
        for word in (one, other)
    ]
    return not stems[0].isdisjoint(stems[1])


def swaps(word: str) -> set[str]:
    """Return the words that swapping two neighbouring letters of a word makes."""
    return {word[:n] + word[n + 1] + word[n] + word[n + 2 :] for n in range(len(word) - 1)}


def one_letter_away(word: str) -> set[str]:
    """Return the words that inserting, deleting or replacing a letter of a word makes."""
    near = set()
    for n in range(len(word) + 1):
        before, after = word[:n], word[n:]
        near |= {before + letter + after for letter in ascii_lowercase}
        near |= {before + letter + after[1:] for letter in ascii_lowercase if after}
        near.add(before + after[1:])
    return near


def is_swapped(typed: str, right: str) -> bool:
    """Return whether the words differ in two neighbouring letters that changed places."""
    if len(typed) != len(right):
        return False
    at = [n for n, (one, two) in enumerate(zip(typed, right, strict=True)) if one != two]
    return (
        len(at) == 2 and at[1] == at[0] + 1 and typed[at[0]] == right[at[1]] and typed[at[1]] == right[at[0]]
    )


def edits(one: str, other: str, most: int) -> int:
    """Return the number of insertions, deletions, replacements and swaps that turn one word into the other, at most `most` + 1."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        older, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return min(row[-1], most + 1)


# Kinds of typing errors


def kind_of(typed: str, meant: str) -> int | None:
    """Return the likeliest kind of typing error that turns `meant` into `typed`, or None, also if `meant` is too short for it."""
    kind = kind_of_any(typed, meant)
    if kind is None:
        return None
    least = LEAST_LETTERS_OF_TWO if kind == TWO else LEAST_LETTERS
    grammatical = meant in words_of_grammar()
    if kind == SWAPPED and len(typed) > len(meant):
        least = SHORT - grammatical
    elif (kind == SWAPPED and len(typed) == len(meant)) or (kind <= NEIGHBOUR and grammatical):
        least = SHORT
    elif kind == TWO and typed[0] == meant[0] and sorted(typed) == sorted(meant):
        least = _ANAGRAM
    return kind if min(len(meant), len(typed) + 1) >= least else None


def kind_of_any(typed: str, meant: str) -> int | None:
    """Return the same kind of error, for words of any length."""
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
    """Return the words that `typed` may be a typo of, for errors up to `kind`; only frequent words for two errors."""
    known = general_words()
    found = {
        word
        for word in swaps(typed) | one_letter_away(typed)
        if word in known.common or word in known.forms or is_usual(word)
    }
    if kind == TWO:
        third = max(1, len(typed) // 3)
        parts = (typed[:third], typed[third : 2 * third], typed[2 * third :])
        usual = general_words().often | words_of_grammar() | NUMBERS_AND_DATES
        near = (
            word for word in usual if abs(len(word) - len(typed)) <= 2 and any(part in word for part in parts)
        )
        found |= {word for word in near if edits(typed, word, 2) <= 2}
    return frozenset(found - {typed})


def is_usual(word: str) -> bool:
    """Return whether a word is a frequent one, a function word, a number or part of a date."""
    return word in words_of_grammar() or word in NUMBERS_AND_DATES or general_words().is_frequent(word)


def _undoubled(word: str) -> str:
    return "".join(letter for n, letter in enumerate(word) if not n or letter != word[n - 1])


@lru_cache(maxsize=1024)
def _are_near(one: str, other: str) -> bool:
    """Return whether two letters have neighbouring keys or sound alike."""
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
