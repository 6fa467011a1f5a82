"""Whether two answers to the same question agree, and whether texts hold an answer. Goes by words."""

from collections.abc import Sequence
from typing import Final

from kvweave.answer_cache.english.spelling import NUMBERS_AND_DATES
from kvweave.answer_cache.english.veto import opposed_words
from kvweave.answer_cache.evidence import WORD, is_non_answer

_FILLERS: Final = frozenset(
    "a an the is are was were it its that this in on at of to by and so be been".split()
)
_NEGATIONS: Final = frozenset("no not never none nobody nothing neither nor cannot without".split())
_SHORT_WORDS: Final = 4
"""Answers of at most so many content words contradict each other unless one contains the other."""
_LEAST_COMMON: Final = 0.3
"""Longer answers that share a smaller part of their content words contradict each other."""


_MOST: Final = 0.8
"""The part of the shorter answer's content words that answers which agree have in common at least."""


def contradict(one: str, other: str) -> bool:
    """Return whether two answers to the same question differ in substance; symmetric.

    They do if a negation, a number or a name of one is not in the other and the other way round, or if they have hardly any
    content word in common. An answer that says the same with more words does not contradict the shorter one.
    """
    first, second = _content(one), _content(other)
    if first == second:
        return False
    if _negated(one) != _negated(other) or _yes_or_no(one) ^ _yes_or_no(other) == {"yes", "no"}:
        return True
    for decisive in (_numbers, _names):
        here, there = decisive(one), decisive(other)
        if here - there and there - here:
            return True
    if first <= second or second <= first:
        return False
    common = len(first & second) / len(first | second)
    return min(len(first), len(second)) <= _SHORT_WORDS or common < _LEAST_COMMON


def agree(one: str, other: str) -> bool:
    """Return whether two answers say the same in substance; symmetric. In doubt, and if either says that there is none, they do not.

    Both must have the same number words and weekdays, and no word of one may be the opposite of another of the other.
    """
    first, second = _content(one), _content(other)
    if not (first and second) or is_non_answer(one) or is_non_answer(other) or contradict(one, other):
        return False
    words = [{_singular_day(word) for word in _words(each)} for each in (one, other)]
    if words[0] & NUMBERS_AND_DATES != words[1] & NUMBERS_AND_DATES:
        return False
    if opposed_words(words[0] - words[1], words[1] - words[0]):
        return False
    return len(first & second) >= _MOST * min(len(first), len(second))


def says_whether(answer: str) -> bool:
    """Return whether an answer begins with yes, or is no and nothing else: "No date is given" says something about a date."""
    words = _words(answer)
    return words[:1] == ["yes"] or words == ["no"]


def support(answer: str, texts: Sequence[str]) -> float:
    """Return the share of an answer's content words that texts contain, 0..1; -1 for one that says that there is none."""
    if is_non_answer(answer):
        return -1.0
    words = _content(answer)
    known = set().union(*map(_content, texts)) if texts else set()
    return len(words & known) / len(words) if words else 0.0


def _words(text: str) -> list[str]:
    return [word.casefold() for word in WORD.findall(text)]


def _singular_day(word: str) -> str:
    return word.removesuffix("s") if word.endswith("days") else word


def _content(text: str) -> set[str]:
    return set(_words(text)) - _FILLERS


def _negated(text: str) -> bool:
    return not _NEGATIONS.isdisjoint(_words(text)) or "n't" in text.replace("’", "'")


def _yes_or_no(text: str) -> set[str]:
    return set(_words(text)[:1]) & {"yes", "no"}


def _numbers(text: str) -> set[str]:
    return {word for word in _words(text) if any(map(str.isdigit, word))}


def _names(text: str) -> set[str]:
    """Return the words with a capital letter inside a sentence, in lower case."""
    inside = [
        found for found in WORD.finditer(text) if found.start() and text[found.start() - 2] not in ".!?"
    ]
    return {found.group().casefold() for found in inside if found.group()[0].isupper()}
