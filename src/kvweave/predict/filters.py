"""Which predicted questions are not worth an answer: nearly asked before, or about what no chunk says.

Goes by words, and errs towards dropping: a question that is not kept costs nothing but its prediction.
"""

import re
from collections.abc import Iterable
from typing import Final

NEARLY_THE_SAME: Final = 0.97
"""Least cosine of questions that are the same but for a word or two, if they name the same names and numbers."""

WORDS: Final = re.compile(r"\w+(?:[.,:/-]\d+)*")
_NEGATIONS: Final = frozenset("no not never nobody nothing none without neither nor".split())
_SMALL: Final = frozenset(
    """s t a about after all an and any are as at be been before by can could did do does for from had has have how i if in
    into is it its many me much my of on or our she should some than that the their them there these they this those to
    one ones us was we were what when where which while who whom whose why will with would you your he his her""".split()
)
_ENDING: Final = re.compile(r"(?:ies|ing|es|ed|s|e|y)$")
_SHORT: Final = 3  # letters of a word that has no ending to lose
_NO_ANSWER: Final = re.compile(
    r"""\b(?:(?:is|are|was|were|does|do|did)(?:\s+not|n['’]t)\s+(?:\w+\s+){0,2}?
            (?:mention|state|specif|provide|given|contain|say|include|indicate|available|clear)\w*
        | no\s+(?:information|mention|answer|details?)
        | (?:do|does)(?:\s+not|n['’]t)\s+know | not\s+(?:enough|sufficient)\s+information
        | (?:can\s?not|can['’]t|unable\s+to)\s+(?:be\s+)?(?:answer|determin|find|found|tell)\w*
        | not\s+(?:mentioned|stated|specified|provided|known)
        | unknown)""",
    re.IGNORECASE | re.VERBOSE,
)


def nearly_same(one: str, other: str, cosine: float) -> bool:
    """Whether two questions of this similarity (-1..1) differ in nothing that an answer depends on; symmetric."""
    return cosine >= NEARLY_THE_SAME and _telling(one) == _telling(other)


def is_about(question: str, chunks: Iterable[str]) -> bool:
    """Whether chunks can hold the answer: every name and number of the question, and another word that it turns on."""
    said = {word.casefold() for chunk in chunks for word in WORDS.findall(chunk)}
    named = _named(question)
    turning = {word.casefold() for word in WORDS.findall(question)} - _SMALL - _NEGATIONS - named
    if not turning:
        return bool(named) and named <= said
    return named <= said and bool(set(map(_stem, turning)) & set(map(_stem, said)))


def says_nothing(answer: str) -> bool:
    """Whether an answer, in English, is empty or says that there is none."""
    return not answer.strip() or _NO_ANSWER.search(answer) is not None


def _stem(word: str) -> str:
    """A word without the commonest endings, so that "owns" stands for "own"."""
    return _ENDING.sub("", word) if len(word) > _SHORT else word


def _telling(question: str) -> tuple[frozenset[str], bool]:
    negated = any(word.casefold() in _NEGATIONS for word in WORDS.findall(question))
    return frozenset(_named(question)), negated or "n't" in question.replace("’", "'")


def _named(question: str) -> set[str]:
    """Words with a digit or with a capital that no sentence begins with, in lower case; "I" is none."""
    words = WORDS.findall(question)
    capitals = {word for word in words[1:] if word[0].isupper() and word != "I"}
    return {word.casefold() for word in capitals | {word for word in words if any(map(str.isdigit, word))}}


_BULLET: Final = re.compile(r"^\s*(?:[-*•–]+|\(?\d{1,2}[.):]|[Qq](?:uestion)?\s*\d{0,2}\s*[.:)])\s*")
_AROUND: Final = " \t\"'*_`“”‘’"
_FEWEST, _MOST = 3, 40  # words of a question


def questions_in(reply: str, most: int) -> list[str]:
    """The questions of a reply in order, each once, without bullets, numbers and quotes; what is no question is left out."""
    found: dict[str, str] = {}
    for line in reply.splitlines():
        text = _BULLET.sub("", line, count=1).strip(_AROUND)
        end = text.find("?")
        question = " ".join(text[: end + 1].split())
        if end >= 0 and _FEWEST <= len(WORDS.findall(question)) <= _MOST:
            found.setdefault(question.casefold(), question)
    return list(found.values())[:most]
