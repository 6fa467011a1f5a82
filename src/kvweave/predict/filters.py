"""Parses predicted questions from a model's reply, and filters out those that are not worth an answer.

The filters go by words and drop a question in case of doubt: a dropped question costs only its prediction.
"""

import re
from collections.abc import Iterable
from typing import Final

NEAR_DUPLICATE_COSINE: Final = 0.97
"""Least cosine of questions that differ in a word or two only, provided they contain the same names and numbers."""

WORD: Final = re.compile(r"\w+(?:[.,:/-]\d+)*")
"""A word, or a number with what is inside it, such as 1,200 or 14:30."""

_BULLET: Final = re.compile(r"^\s*(?:[-*•–]+|\(?\d{1,2}[.):]|[Qq](?:uestion)?\s*\d{0,2}\s*[.:)])\s*")
_AROUND: Final = " \t\"'*_`“”‘’"
_MIN_WORDS, _MAX_WORDS = 3, 40  # of a question
_NEGATIONS: Final = frozenset("no not never nobody nothing none without neither nor".split())
_STOP_WORDS: Final = frozenset(
    """s t a about after all an and any are as at be been before by can could did do does for from had has have how i if in
    into is it its many me much my of on or our she should some than that the their them there these they this those to
    one ones us was we were what when where which while who whom whose why will with would you your he his her""".split()
)
_ENDING: Final = re.compile(r"(?:ies|ing|es|ed|s|e|y)$")
_MIN_STEM_LETTERS: Final = 3  # words up to this length have no ending to strip
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


def parse_questions(reply: str, most: int) -> list[str]:
    """Return the first questions of a reply, each once, without bullets, numbers and quotes; other text is left out."""
    found: dict[str, str] = {}
    for line in reply.splitlines():
        text = _BULLET.sub("", line, count=1).strip(_AROUND)
        end = text.find("?")
        question = " ".join(text[: end + 1].split())
        if end >= 0 and _MIN_WORDS <= len(WORD.findall(question)) <= _MAX_WORDS:
            found.setdefault(question.casefold(), question)
    return list(found.values())[:most]


def is_near_duplicate(one: str, other: str, cosine: float) -> bool:
    """Return whether two questions of this similarity (-1..1) have the same names, numbers and negation; symmetric."""
    return cosine >= NEAR_DUPLICATE_COSINE and _decisive_words(one) == _decisive_words(other)


def is_answerable(question: str, chunks: Iterable[str]) -> bool:
    """Return whether the chunks contain every name and number of the question, and one of its other content words."""
    words = {word.casefold() for chunk in chunks for word in WORD.findall(chunk)}
    names = _names(question)
    content = {word.casefold() for word in WORD.findall(question)} - _STOP_WORDS - _NEGATIONS - names
    if not content:
        return bool(names) and names <= words
    return names <= words and bool(set(map(_stem, content)) & set(map(_stem, words)))


def is_non_answer(answer: str) -> bool:
    """Return whether an answer, in English, is empty or says that there is none."""
    return not answer.strip() or _NO_ANSWER.search(answer) is not None


def _stem(word: str) -> str:
    """Return a word without the most common endings, so that "owns" matches "own"."""
    return _ENDING.sub("", word) if len(word) > _MIN_STEM_LETTERS else word


def _decisive_words(question: str) -> tuple[frozenset[str], bool]:
    """Return the names and numbers of a question, and whether it is negative."""
    negated = any(word.casefold() in _NEGATIONS for word in WORD.findall(question))
    return frozenset(_names(question)), negated or "n't" in question.replace("’", "'")


def _names(question: str) -> set[str]:
    """Return words with a digit or with a capital inside the sentence, in lower case; "I" is not one."""
    words = WORD.findall(question)
    capitals = {word for word in words[1:] if word[0].isupper() and word != "I"}
    return {word.casefold() for word in capitals | {word for word in words if any(map(str.isdigit, word))}}
