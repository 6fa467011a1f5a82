"""Recognises typing errors: a word that is no word, one or two letters away from a word of another question.

Numbers, names and short words are never taken for errors, nor is a word that is a general one. Whether the user's documents
have the word is the caller's to check.
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache
from typing import Final, NamedTuple

from kvweave.answer_cache.english.general_words import general_words
from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.languages import ENGLISH, function_words

_WORD: Final = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")

_LONG: Final = 5  # letters of a word in which one letter may be wrong
_VERY_LONG: Final = 9  # letters of a word in which two may be
_SWAPPED: Final = 4  # letters of a word in which two neighbours may have changed places
_MONTHS_AND_DAYS: Final = frozenset(
    "january february march april june july august september october november december monday tuesday wednesday thursday friday "
    "saturday sunday".split()
)


class Correction(NamedTuple):
    """A question with its typing errors undone, and the words that were taken for errors, in lower case."""

    text: str
    errors: tuple[str, ...]


def corrected(text: str, other: str) -> Correction | None:
    """Return a cleaned question whose typing errors of words of another one are undone; None without any."""
    words, wanted = list(_WORD.finditer(text)), list(_WORD.finditer(other))
    plain, target = ([word[0].lower() for word in each] for each in (words, wanted))
    pieces, errors, end = [], [], 0
    for operation, i, j, k, m in SequenceMatcher(None, plain, target, autojunk=False).get_opcodes():
        if operation != "replace" or j - i != m - k:
            continue
        for word, meant in zip(words[i:j], wanted[k:m], strict=True):
            if is_typing_error(word[0], meant[0], first=not word.start() or not meant.start()):
                pieces += [text[end : word.start()], meant[0]]
                errors.append(word[0].lower())
                end = word.end()
    return Correction("".join((*pieces, text[end:])), tuple(errors)) if errors else None


def is_typing_error(word: str, meant: str, first: bool = False) -> bool:
    """Return whether a word is a misspelling of another one, and no word itself; `first` is whether it begins the question."""
    typed, right = word.lower(), meant.lower()
    if not (typed.isascii() and typed.isalpha() and right.isascii() and right.isalpha()):
        return False
    closed = right in _MONTHS_AND_DAYS
    named = any(letter.isupper() for letter in (word[first:] + meant[first:]))
    if named and not closed:
        return False
    return _is_near(typed, right) and (closed or _is_general(right)) and not is_word(typed)


def is_word(word: str) -> bool:
    """Return whether a word in lower case is a general word, a function word or a name."""
    return word in _function_words() or word in lexicon().single_words or general_words().is_known(word)


def unknown_words(words: Iterable[str]) -> list[str]:
    """Return the words in lower case that are neither general words nor names."""
    return [word for word in words if not is_word(word)]


def _is_general(word: str) -> bool:
    return word in _function_words() or word in lexicon().single_words or general_words().is_common(word)


@cache
def _function_words() -> frozenset[str]:
    return function_words()[ENGLISH] | lexicon().function_words | {"which", "whose", "whom"}


def _is_near(typed: str, right: str) -> bool:
    """Return whether few enough letters differ for the length of the words."""
    shorter = min(len(typed), len(right))
    is_function_word = right in _function_words()
    if _is_swapped(typed, right):
        return shorter >= _SWAPPED or (is_function_word and shorter == _SWAPPED - 1)  # "teh"
    if is_function_word and len(right) >= _LONG:
        return edits(typed, right, 1) == 1  # "wich"
    if shorter < _LONG:
        return False
    ends = typed[0] == right[0] and typed[-1] == right[-1] and sorted(typed) == sorted(right)
    return edits(typed, right, 2) <= (2 if shorter >= _VERY_LONG or ends else 1)


def _is_swapped(typed: str, right: str) -> bool:
    """Return whether the words differ in two neighbouring letters that changed places."""
    if len(typed) != len(right):
        return False
    at = [n for n, (one, two) in enumerate(zip(typed, right, strict=True)) if one != two]
    return (
        len(at) == 2 and at[1] == at[0] + 1 and typed[at[0]] == right[at[1]] and typed[at[1]] == right[at[0]]
    )


def edits(one: str, other: str, most: int) -> int:
    """Return how many letters to insert, delete, replace or swap make one word of the other; `most` + 1 for more."""
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
