"""Decides whether two questions may share an answer.

Vectors alone cannot tell: a question and its negation, or two questions that differ in a name, are often more similar
than two paraphrases. So they only propose, and the words decide. Knows nothing about answers, documents or storage.
"""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Protocol

from kvweave.answer_cache.english.alignment import are_same_keywords
from kvweave.answer_cache.english.capitals import Doubt, doubt, is_surely_english
from kvweave.answer_cache.english.context import questions_in
from kvweave.answer_cache.english.dates import fold_dates
from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.answer_cache.english.mistyped import mistyped
from kvweave.answer_cache.english.normalize import (
    EXACT,
    clean_text,
    difference,
    normalization_version,
    normalize,
    strip_frame,
)
from kvweave.answer_cache.english.spelling import corrected
from kvweave.answer_cache.english.veto import (
    are_opposed,
    certain_veto,
    kind_of_pair,
    limits_otherwise,
    negates_otherwise,
    veto,
)
from kvweave.answer_cache.english.words import has_symbols, split_words
from kvweave.answer_cache.other_languages import is_english
from kvweave.answer_cache.records import Vector

_LOG = logging.getLogger(__name__)

Sameness = Literal["same", "near", "different"]
"""same: they ask the same. near: they may ask the same. different: they ask for something else, or nothing tells."""

READING: Final = "reading"
"""The kind of questions that are read alike."""

CAPITALS: Final = "capitals"
"""The kind of questions that differ, or may differ, in the meaning that capitals give to a word."""

_LEAST_COSINE: Final = 0.35
"""Keywords that are less similar to a question are not the same, whatever their words."""

_REMEMBERED: Final = 4096
"""For how many questions what is found out about their words is kept: the same stored ones are compared again and again."""

_MOST_CHARACTERS: Final = 400
"""Longer questions are not searched for typing errors or context."""


_RESPONSIBLE: Final = re.compile(
    r"who(?: owns|(?: is|'s) the owner of|(?: is|'s) (?:responsible|accountable) for|(?: is|'s) in charge of) (?:the )?([a-z]+(?: [a-z]+){0,3})[ ?.!]*",
    re.IGNORECASE,
)
_TASKS: Final = frozenset(
    "task project process migration rollout audit survey deployment onboarding test review check update".split()
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two questions gave.

    Attributes:
        sameness: the verdict.
        kind: what it rests on: "words", "reading", "spelling", "context", "keywords"; "reading", "keywords", "wording", "context" or
            "capitals" if they are near; else the difference.
        errors: words in lower case that were taken for typing errors of others, and words that they may be errors of as well: it holds
            where the documents have none of them.
    """

    sameness: Sameness
    kind: str
    errors: tuple[str, ...] = ()


class Matcher(Protocol):
    """A rule for questions that may share an answer."""

    @property
    def version(self) -> int:
        """A number below 2^48 that changes whenever the keys do."""
        ...

    def key(self, question: str) -> str:
        """Return the key that candidates are looked up by; questions that are read alike have equal ones."""
        ...

    def is_time_sensitive(self, question: str) -> bool:
        """Return whether the answer depends on when the question is asked."""
        ...

    def compare(self, question: str, other: str, cosine: float, threshold: float) -> Comparison:
        """Return whether two questions may share an answer; symmetric.

        Args:
            question: any text.
            other: another one.
            cosine: between their vectors, -1..1.
            threshold: τ, the least cosine of questions in other words that may share an answer (PerCache §4.2.1), 0..1.
        """
        ...

    def same(self, question: str, other: str, cosine: float, threshold: float) -> bool:
        """Return whether `compare` is certain that two questions ask the same."""
        ...


class EnglishMatcher:
    """Compares the words and the normalized form of English questions."""

    @property
    def version(self) -> int:
        """The version of the normalization."""
        return normalization_version()

    def key(self, question: str) -> str:
        """Return the key of the normalized question."""
        return normalize(question).key

    def is_time_sensitive(self, question: str) -> bool:
        """Return whether it holds words such as "today", be it in the question or in what is said around it."""
        return normalize(question).time_sensitive

    def compare(self, question: str, other: str, cosine: float, threshold: float) -> Comparison:
        """Compare as `Matcher.compare`: words first, then readings, then without typing errors and context; capitals last."""
        compared = self._without_capitals(question, other, cosine, threshold)
        if compared.sameness == "different":
            return compared
        between = doubt(clean_text(question), clean_text(other))
        if between is Doubt.MEANING:
            return Comparison("different", CAPITALS)
        if between is not Doubt.NONE and compared.sameness == "same":
            return Comparison("near", CAPITALS, compared.errors)
        return compared

    def _without_capitals(self, question: str, other: str, cosine: float, threshold: float) -> Comparison:
        """Compare two questions whose capitals mean nothing."""
        one, two = normalize(question), normalize(other)
        if one.time_sensitive or two.time_sensitive:
            return Comparison("different", "time")
        unlike = difference(one, two)
        if unlike is None and one.asks != EXACT:
            unlike = _unread_difference(question, other)
        if unlike is None and cosine >= threshold:
            return Comparison("same", READING)
        return self._by_words(question, other, cosine, threshold, unlike)

    def _by_words(
        self, question: str, other: str, cosine: float, threshold: float, unlike: str | None
    ) -> Comparison:
        """Compare two questions that are not certainly read alike; `unlike` is in what their readings differ."""
        first, second = clean_text(question), clean_text(other)
        english = [_is_english(text) for text in (first, second)]
        if first.lower() == second.lower() and (
            (any(english) and is_surely_english(first)) or first[1:] == second[1:]
        ):
            return Comparison("same", "words")  # in other languages a capital may change what is asked
        if max(len(first), len(second)) <= _MOST_CHARACTERS and any(english):
            try:
                if all(english):
                    return _compared(first, second, cosine, threshold)
                # What looks like another language may be errors.
                found = mistyped(first, second) if first.isascii() and second.isascii() else None
                if found is not None:
                    return Comparison("same", "spelling", found.errors + found.rivals)
            except (LookupError, ValueError):
                # No known text comes here. If one does, its request must not fail.
                _LOG.warning("two questions could not be compared and count as different", exc_info=True)
        return Comparison("different", unlike or "distance")

    def same(self, question: str, other: str, cosine: float, threshold: float) -> bool:
        """Return whether they ask the same for certain."""
        return self.compare(question, other, cosine, threshold).sameness == "same"


def _compared(first: str, second: str, cosine: float, threshold: float) -> Comparison:
    """Compare two cleaned English questions that are not read alike as they are."""
    for core in questions_in(first):
        for other_core in questions_in(second):
            moved = (core != first) + (other_core != second)
            if moved > 1:
                continue  # what is said around them may differ
            errors = _same_words(core, other_core, cosine >= threshold)
            if errors is not None:
                plain = not errors and plain_words(core) == plain_words(other_core)
                kind = "spelling" if not plain else "context" if moved else "words"
                return Comparison("same", kind, errors)
    if first != second and _in_charge(first) == _in_charge(second) != "":
        return Comparison("same", "wording")
    return _nearness(questions_in(first)[-1], questions_in(second)[-1], cosine, threshold)


def _nearness(first: str, second: str, cosine: float, threshold: float) -> Comparison:
    """Compare two cleaned questions in other words."""
    differs = certain_veto(first, second)
    if differs is not None or cosine < _LEAST_COSINE:
        return Comparison("different", differs or "distance")
    kind = kind_of_pair(first, second)
    if kind == "keywords" and are_same_keywords(first, second):
        return Comparison("same", kind)
    differs = veto(first, second)
    if differs is None and cosine >= threshold:
        return Comparison("near", kind)
    return Comparison("different", differs or "distance")


@lru_cache(maxsize=_REMEMBERED)
def _in_charge(text: str) -> str:
    """Return what a cleaned question asks who is in charge of, if it is a task; else an empty text.

    Who owns a task is responsible for it: a retest, the budget review. Who owns a thing need not be.
    """
    text = strip_frame(text, lexicon())[0]
    found = _RESPONSIBLE.fullmatch(text)
    if found is None:
        return ""
    words = found[1].casefold().split()
    return " ".join(words) if words[-1].removeprefix("re") in _TASKS or words[-1] in _TASKS else ""


ENGLISH: Final[Matcher] = EnglishMatcher()


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of two vectors (dimensions,) of length 1."""
    return float(one @ other)


def _same_words(one: str, other: str, near: bool) -> tuple[str, ...] | None:
    """Return the typing errors that two texts differ by; None if they differ by more.

    Texts that are `near` may also be read alike without their errors.
    """
    if plain_words(one) == plain_words(other):
        return ()
    first, second = one, other
    one, other, errors = _undone(one, other)
    if errors and are_opposed(first, second):
        return None
    if errors and plain_words(one) == plain_words(other):
        return errors
    if found := mistyped(first, second):
        return found.errors + found.rivals
    if not near:
        return None
    here, there = normalize(one), normalize(other)
    alike = here.asks != EXACT and difference(here, there) is None
    return errors if alike and _unread_difference(one, other) is None else None


def _unread_difference(one: str, other: str) -> str | None:
    """Return in what two questions differ that are read alike, negation or scope; None if in neither."""
    if negates_otherwise(one, other):
        return "negation"
    return "scope" if limits_otherwise(one, other) else None


def _undone(one: str, other: str) -> tuple[str, str, tuple[str, ...]]:
    """Return two cleaned texts whose typing errors of each other's words are undone, and the errors; see `corrected`."""
    first = corrected(one, other)
    if first is not None:
        one = first.text
    second = corrected(other, one)
    if second is not None:
        other = second.text
    return (
        one,
        other,
        tuple(error for fixed in (first, second) if fixed is not None for error in fixed.errors),
    )


@lru_cache(maxsize=_REMEMBERED)
def _is_english(text: str) -> bool:
    return is_english(text, lexicon())


@lru_cache(maxsize=_REMEMBERED)
def plain_words(text: str) -> tuple[str, ...]:
    """Return what two texts have in common that differ in case and punctuation alone."""
    if has_symbols(text):
        return (text.casefold().rstrip(" .?!"),)
    return tuple(word.text for word in fold_dates(split_words(text))) or (text,)
