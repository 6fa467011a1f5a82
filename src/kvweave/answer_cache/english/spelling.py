"""Recognises typing errors, their kinds, and the words that may be meant.

A typing error is a word that is no word, one letter away from a word of another question and from no other word.

Numbers, dates, names and short words are never taken for errors, nor is a word that is a general one. Where two questions are equal
but for their errors, `mistyped` takes more for one. Whether the user's documents have the word is the caller's to check.
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import cache, lru_cache
from string import ascii_lowercase
from typing import Final, NamedTuple

from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.answer_cache.english.wordnet import general_words, related_words
from kvweave.languages import ENGLISH, function_words

_WORD: Final = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")

_LONG: Final = 5  # letters of a word in which one letter may be wrong
_LEAST_SWAPPED: Final = 4  # letters of a word in which two neighbours may have changed places
_PREFIXES: Final = ("un", "in", "im", "dis", "non", "mis", "re", "de", "pre")
NUMBERS_AND_DATES: Final = frozenset(
    "january february march april may june july august september october november december monday tuesday wednesday thursday "
    "friday saturday sunday zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion dozen half "
    "quarter once twice thrice first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth "
    "ninetieth hundredth thousandth millionth".split()
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
            begins = not word.start() or not meant.start()
            if is_typing_error(word[0], meant[0], begins):
                pieces += [text[end : word.start()], meant[0]]
                errors.append(word[0].lower())
                end = word.end()
    return Correction("".join((*pieces, text[end:])), tuple(errors)) if errors else None


def is_typing_error(word: str, meant: str, first: bool = False) -> bool:
    """Return whether a word is a misspelling of another one, and no word itself; `first` is whether it begins the question."""
    typed, right = word.lower(), meant.lower()
    if not (typed.isascii() and typed.isalpha() and right.isascii() and right.isalpha()):
        return False
    if right in NUMBERS_AND_DATES or any(letter.isupper() for letter in (word[first:] + meant[first:])):
        return False
    return (
        _is_near(typed, right)
        and is_general(right)
        and not is_word(typed)
        and not differ_by_prefix(typed, right)
        and not _may_be_another(typed, right)
    )


def is_word(word: str) -> bool:
    """Return whether a word in lower case is a general word, a function word or a name."""
    return word in words_of_grammar() or word in lexicon().single_words or general_words().is_known(word)


def unknown_words(words: Iterable[str]) -> list[str]:
    """Return the words in lower case that are neither general words nor names."""
    return [word for word in words if not is_word(word)]


def is_general(word: str) -> bool:
    """Return whether a word in lower case is a general word or a function word."""
    return word in words_of_grammar() or word in lexicon().single_words or general_words().is_common(word)


def is_compound(word: str) -> bool:
    """Return whether a word in lower case is two that texts have often, and no name: "hotline"."""
    if word in general_words().names:
        return False
    parts = ((word[:n], word[n:]) for n in range(SHORT, len(word) - SHORT + 1))
    return any(all(map(related_words().is_frequent, pair)) for pair in parts)


@cache
def words_of_grammar() -> frozenset[str]:
    """Return the words that only relate others or ask."""
    return function_words()[ENGLISH] | lexicon().function_words | {"which", "whose", "whom"}


def _is_near(typed: str, right: str) -> bool:
    """Return whether the words differ in one letter behind the first, or in two neighbours that changed places."""
    shorter = min(len(typed), len(right))
    if is_swapped(typed, right):
        return shorter >= _LEAST_SWAPPED or (
            right in words_of_grammar() and shorter == _LEAST_SWAPPED - 1
        )  # "teh"
    return shorter >= _LONG and typed[0] == right[0] and edits(typed, right, 1) == 1


def differ_by_prefix(one: str, other: str) -> bool:
    """Return whether the words are equal but for what is put in front: "inactive", "reactive"."""
    stems = [
        {word, *(word.removeprefix(prefix) for prefix in _PREFIXES if word.startswith(prefix))}
        for word in (one, other)
    ]
    return not stems[0].isdisjoint(stems[1])


@lru_cache(maxsize=1024)
def _may_be_another(typed: str, right: str) -> bool:
    """Return whether a third word is as near; letters that changed places are nearer than others."""
    swapped = swaps(typed)
    near = swapped if right in swapped else swapped | one_letter_away(typed)
    return any(is_word(word) or word in NUMBERS_AND_DATES for word in near - {typed, right})


def swaps(word: str) -> set[str]:
    """Return what a word becomes by two neighbouring letters that change places."""
    return {word[:n] + word[n + 1] + word[n] + word[n + 2 :] for n in range(len(word) - 1)}


def one_letter_away(word: str) -> set[str]:
    """Return what a word becomes by a letter more, less, or another one."""
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


# Kinds of typing errors


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
