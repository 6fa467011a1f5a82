"""What a question says, in a form in which two questions that ask the same are equal.

The words that carry meaning, each as its base form and in an order that survives the usual ways of saying the same:
possessives and "of", passives, questions inside requests, phrases at the front or at the end. What is asked for,
negation and tense stand beside it. English only; anything else is read word for word, so that only the same words
agree. Knows neither vectors nor answers.

The reading errs on one side: a paraphrase that is read differently costs a computation, so every doubt ends there.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from kvweave.answer_cache.english.moments import fold, is_moment
from kvweave.answer_cache.english.order import Phrase, ordered
from kvweave.answer_cache.english.parse import parse
from kvweave.answer_cache.english.words import (
    Lexicon,
    Word,
    join_expressions,
    lexicon,
    lexicon_text,
    plain,
    says_in_signs,
    words,
)

VERSION: Final = 3
"""Of the code that reads: raised with every change of this module, or of what it calls, that changes keys."""

EXACT: Final = "exact"
"""What a question asks for that is compared word for word."""

_MOST_WORDS: Final = 40  # longer ones hold more than a question
_ROUNDS: Final = 4  # of openings said one after the other: "Hi, can you please tell me …"
_GENERAL: Final = {"when": ("time", "date")}
"""What "when" may ask for: a time of day and a date are each an answer to it, not to each other."""


@dataclass(frozen=True, slots=True)
class NormalizedQuestion:
    """A question, read.

    Attributes:
        asks: the kind of answer: who, what, when, time, date, where, why, how, whether, many, price, …, or EXACT.
        terms: the words that carry meaning, in a canonical order.
        phrases: what prepositions introduce.
        negated: whether the question is negative.
        tense: past, present or future.
        bound_to_now: whether its answer depends on the moment it is asked in.
    """

    asks: str
    terms: tuple[str, ...]
    phrases: tuple[Phrase, ...] = ()
    negated: bool = False
    tense: str = "present"
    bound_to_now: bool = False

    @property
    def may_be_planned(self) -> bool:
        """Whether present and future tense say the same of it: "When does it start", "Do they come on Monday"."""
        dated = any(is_moment(term) for phrase in self.phrases for term in phrase.terms)
        return self.tense != "past" and (self.asks != "whether" or dated)

    @property
    def key(self) -> str:
        """Names everything but what is asked for and the tense; readings that agree have the same: 32 hex digits."""
        told = json.dumps([self.asks == EXACT, self.terms, self.phrases, self.negated])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


@cache
def readings_version() -> int:
    """Names the keys that readings have now, by VERSION and the lexicon: below 2^48."""
    return int.from_bytes(hashlib.blake2b(f"{VERSION} {lexicon_text()}".encode(), digest_size=6).digest())


def read(question: str) -> NormalizedQuestion:
    """Read a question; every text has a reading."""
    known = lexicon()
    text = plain(question)
    core, requested = _without_frame(text, known)
    folded = join_expressions(fold(words(core)))
    whole = fold(words(text))
    bound = _bound_to_now(whole, known)
    if says_in_signs(text):  # which no word would tell apart: > and <, 5 and -5
        return NormalizedQuestion(EXACT, tuple(text.casefold().rstrip(" .?!").split()), bound_to_now=bound)
    clause = parse(folded, requested, known) if 0 < len(folded) <= _MOST_WORDS and "?" not in core else None
    if clause is None:
        return NormalizedQuestion(EXACT, tuple(word.text for word in whole), bound_to_now=bound)
    terms, phrases = ordered(clause, known)
    if not terms and not phrases:
        return NormalizedQuestion(EXACT, tuple(word.text for word in whole), bound_to_now=bound)
    return NormalizedQuestion(clause.asks, terms, phrases, clause.negated, clause.tense, bound)


def disagreement(one: NormalizedQuestion, other: NormalizedQuestion) -> str | None:
    """In what two questions differ, as a word or two for people; None if they ask the same."""
    if one.key != other.key:
        if one.negated != other.negated:
            return "negation"
        return "words or their roles"
    if one.asks != other.asks and not _one_may_stand_for_the_other(one.asks, other.asks):
        return "what is asked for"
    if one.tense != other.tense and not (one.may_be_planned and other.may_be_planned):
        return "tense"
    return None


def _one_may_stand_for_the_other(one: str, other: str) -> bool:
    return other in _GENERAL.get(one, ()) or one in _GENERAL.get(other, ())


def _without_frame(text: str, known: Lexicon) -> tuple[str, bool]:
    """The question inside "Hi, could you tell me … please?", and whether something was said around it."""
    core, requested = text, False
    core = re.sub(r"[\s.!?]+$", "", core)
    for _ in range(_ROUNDS):
        before = core
        for pattern, into in known.rewritten:
            core = pattern.sub(into, core, count=1) if pattern.match(core) else core
        for pattern in known.openings:
            match = pattern.match(core)
            if match and match.end() < len(core):
                core, requested = core[match.end() :].lstrip(" ,:;.-"), True
        for pattern in known.closings:
            shorter = pattern.sub("", core)
            if shorter and shorter != core:
                core = re.sub(r"[\s.!?,]+$", "", shorter)
        if core == before:
            break
    return core, requested


def _bound_to_now(folded: list[Word], known: Lexicon) -> bool:
    for number, word in enumerate(folded):
        following = folded[number + 1] if number + 1 < len(folded) else None
        if word.text in known.bound_to_now:
            return True
        of_time = following is not None and (
            following.base in known.units_of_time or is_moment(following.base)
        )
        if word.text in known.shifting and of_time:
            return True
    return False
