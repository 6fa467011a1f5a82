"""Normalizes a question, so that questions that ask the same are equal.

The result holds the meaningful words, each in its base form and in a canonical order. It survives the usual ways to say
the same: possessives and "of", passives, questions inside requests, phrases at the front or at the end. What is asked
for, negation and tense are kept beside it. English only: an English question that is not followed is compared word for
word, one in another language as it is written. Knows neither vectors nor answers.

A paraphrase that is not recognised costs a computation, a false match a wrong answer: every doubt counts as a difference.
"""

import hashlib
import json
import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, Literal

from kvweave.answer_cache.english.dates import fold_dates, is_date
from kvweave.answer_cache.english.lexicon import Lexicon, lexicon, lexicon_text
from kvweave.answer_cache.english.parse import Clause, parse
from kvweave.answer_cache.english.terms import Phrase, canonical_terms
from kvweave.answer_cache.english.words import (
    Word,
    has_symbols,
    join_expressions,
    split_words,
)
from kvweave.answer_cache.other_languages import as_written, depends_on_today, is_english

VERSION: Final = 9
"""Version of the code that normalizes: raise it with every change of this package that changes keys."""

EXACT: Final = "exact"
"""The kind of a question that is compared word for word."""

_LOG = logging.getLogger(__name__)
_MAX_WORDS: Final = 40  # a longer text is more than a question
_MAX_CHARACTERS: Final = 1000
"""A longer text is more than a question too. It is compared as it is written: some steps here, and Unicode normalization
itself, take time that grows with the square of the length."""

_MOST_KEYWORDS: Final = 8
_MOST_OF_TIME: Final = 4  # words of a length of time: "a couple of days"
_PAST: Final = frozenset("did was were had".split())
_COUNT: Final = re.compile(r"#[\d.]+")
_MAX_ROUNDS: Final = 4  # of removing an opening: "Hi, can you please tell me …"
_QUOTES: Final = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "`": "'"})
_RAISED: Final = ("<super>", "<sub>", "<fraction>")
_GENERAL: Final = {"when": ("time", "date")}
"""Kinds that may stand for a narrower one: "when" for a time of day or a date, but these not for each other."""


@dataclass(frozen=True, slots=True)
class NormalizedQuestion:
    """A question in its normalized form.

    Attributes:
        asks: the kind of answer: who, what, when, time, date, where, why, how, whether, many, price, …, or EXACT.
        terms: the meaningful words, in a canonical order.
        phrases: what prepositions introduce.
        negated: whether the question is negative.
        tense: past, present or future.
        time_sensitive: whether the answer depends on when it is asked.
    """

    asks: str
    terms: tuple[str, ...]
    phrases: tuple[Phrase, ...] = ()
    negated: bool = False
    tense: str = "present"
    time_sensitive: bool = False

    @property
    def may_be_planned(self) -> bool:
        """Whether its present tense may mean the future: "When does it start", "Do they come on Monday"."""
        dated = any(is_date(term) for phrase in self.phrases for term in phrase.terms)
        return self.tense != "past" and (self.asks != "whether" or dated)

    @property
    def key(self) -> str:
        """32 hex digits that name everything but tense and what is asked for; equal for questions that agree."""
        content = json.dumps([self.asks == EXACT, self.terms, self.phrases, self.negated])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@cache
def normalization_version() -> int:
    """Return a number below 2^48 that changes with VERSION and with the lexicon: keys of other versions are void."""
    return int.from_bytes(hashlib.blake2b(f"{VERSION} {lexicon_text()}".encode(), digest_size=6).digest())


def normalize(question: str) -> NormalizedQuestion:
    """Return the normalized form of any text, in time that grows with its length."""
    if len(question) > _MAX_CHARACTERS:
        return _normalized(question)
    return _remembered(question)


def _normalized(question: str) -> NormalizedQuestion:
    known = lexicon()
    text = clean_text(question)
    whole = fold_dates(split_words(text))
    time_sensitive = _is_time_sensitive(whole, known) or depends_on_today(text)
    if not is_english(text, known):
        return NormalizedQuestion(EXACT, (as_written(text),), time_sensitive=time_sensitive)
    if has_symbols(text):  # words alone would not tell > from <, or 5 from -5
        return NormalizedQuestion(
            EXACT, tuple(text.casefold().rstrip(" .?!").split()), time_sensitive=time_sensitive
        )
    if len(text) <= _MAX_CHARACTERS:
        understood = _understood(text, known)
        if understood is not None:
            clause, terms, phrases = understood
            return NormalizedQuestion(
                clause.asks, terms, phrases, clause.negated, clause.tense, time_sensitive
            )
    words = tuple(word.text for word in whole)
    return NormalizedQuestion(EXACT, words or (text,), time_sensitive=time_sensitive)


_remembered = lru_cache(maxsize=4096)(_normalized)  # one request normalizes its question several times


def _understood(text: str, known: Lexicon) -> tuple[Clause, tuple[str, ...], tuple[Phrase, ...]] | None:
    """Return the clause of a cleaned text, its terms and its phrases; None if it is not followed as an English question."""
    core, requested = strip_frame(text, known)
    words = join_expressions(fold_dates(split_words(core)))
    if not words or len(words) > _MAX_WORDS or "?" in core:
        return None
    if not requested:
        words = [*_asked_by_keywords(words, known), *words]
    try:
        clause = parse(words, requested, known)
        if clause is None:
            return None
        terms, phrases = canonical_terms(clause, known)
    except (LookupError, ValueError):
        # No known text comes here. If one does, its request must not fail: it only finds no other question's answer.
        _LOG.warning("a question could not be followed and is compared word for word", exc_info=True)
        return None
    return (clause, terms, phrases) if terms or phrases else None


def _asked_by_keywords(words: Sequence[Word], known: Lexicon) -> list[Word]:
    """Return "what is" or "who is" for words that only name what is asked for, and of what; else nothing.

    "battery retest date", "owner of the boat": at most one name, so that no role is in doubt.
    """
    texts = [word.text for word in words]
    of = texts.index("of") if "of" in texts else len(words)
    head = words[of - 1]
    if not 1 < len(words) <= _MOST_KEYWORDS or sum(word.named for word in words) > 1 or head.named:
        return []
    if any(word.comma or word.form for word in words):
        return []
    if not (known.helpers | known.negations).isdisjoint(texts):
        return []
    if not known.function_words.isdisjoint(texts[:of]):
        return []
    if head.base in known.nouns_to_verbs:
        return split_words("who is the")
    asks = {*known.asks, *known.measures.values(), *known.dated, *known.identifiers}
    return split_words("what is the") if head.base in asks else []


def difference(one: NormalizedQuestion, other: NormalizedQuestion) -> str | None:
    """Return in what two questions differ, as a word or two for people; None if they ask the same."""
    if one.key != other.key:
        if one.negated != other.negated:
            return "negation"
        return "words or their roles"
    if one.asks != other.asks and not _is_general(one.asks, other.asks):
        return "what is asked for"
    if one.tense != other.tense and not (one.may_be_planned and other.may_be_planned):
        return "tense"
    return None


def _is_general(one: str, other: str) -> bool:
    """Return whether one of two kinds may stand for the other."""
    return other in _GENERAL.get(one, ()) or one in _GENERAL.get(other, ())


def strip_frame(text: str, known: Lexicon) -> tuple[str, bool]:
    """Return the question inside "Hi, could you tell me … please?", and whether there was an opening."""
    core, requested = text.rstrip(" .!?"), False
    for _ in range(_MAX_ROUNDS):
        before = core
        for pattern, replacement in known.rewrites:
            core = pattern.sub(replacement, core, count=1) if pattern.match(core) else core
        for pattern in known.openings:
            match = pattern.match(core)
            if match and match.end() < len(core):
                core, requested = core[match.end() :].lstrip(" ,:;.-"), True
        for pattern in known.closings:
            shorter = pattern.sub("", core)
            if shorter and shorter != core:
                core = shorter.rstrip(" .!?,")
        if core == before:
            break
    return core, requested


def _is_time_sensitive(words: list[Word], known: Lexicon) -> bool:
    """Return whether words such as "today" or "next week" relate the question to the present."""
    past = any(word.text in _PAST or word.form == "past" for word in words)
    asked: list[Word] = []  # the words behind the first "how"
    for at, word in enumerate(words):
        after = words[at + 1].text if at + 1 < len(words) else ""
        if word.text == "how" and not asked:
            asked = words[at + 1 : at + 3]
        if word.text in known.time_sensitive and (word.text, after) != ("now", "that"):
            return True
        if word.text == "in" and not past and _is_from_now(words, at, asked, known):
            return True
        if word.text in known.relative and _is_relative(words, at, known):
            return True
    return False


def _is_from_now(words: Sequence[Word], at: int, asked: Sequence[Word], known: Lexicon) -> bool:
    """Return whether what "in" at a place begins is a time from now on, as "in two days" most often is.

    Not where one asks how many hours are in two days, or how much is done in a day. `asked` has the words behind "how".
    """
    time = words[at + 1 : at + 1 + _length_of_time(words, at + 1, known)]
    if len(time) < 2:
        return False
    if not asked or asked[0].text not in ("many", "much", *known.measures):
        return True
    converted = asked[-1].base in known.units_of_time and words[at - 1].text in (*known.be, "there")
    return not (converted or (len(time) == 2 and time[0].text in known.articles))


def _is_relative(words: Sequence[Word], at: int, known: Lexicon) -> bool:
    """Return whether a word such as "next" relates a time to the present; "the last week of the term" does not."""
    length = _length_of_time(words, at + 1, known)
    if not length:
        return at + 1 < len(words) and is_date(words[at + 1].base)
    whole = words[at + 1 + length : at + 4 + length]
    return not (
        words[at].text == "last"
        and len(whole) == 3
        and whole[0].text == "of"
        and whole[1].text in known.articles
        and whole[2].base not in known.units_of_time
    )


def _length_of_time(words: Sequence[Word], at: int, known: Lexicon) -> int:
    """Return how many words from a place on say a length of time: 2 of "two days", 4 of "a couple of days"; 0 if they do not."""
    for n, word in enumerate(words[at : at + _MOST_OF_TIME]):
        if word.base in known.units_of_time:
            return n + 1
        if not (word.text in ("a", "an", "of") or word.text in known.few or _COUNT.fullmatch(word.text)):
            break
    return 0


def clean_text(text: str) -> str:
    """Return a text in the form in which texts are compared: NFKC, straight quotes, single spaces, stripped.

    With a raised or lowered digit or a fraction, NFC.

    A text that is too long for a question keeps its characters.
    """
    plain = unicodedata.normalize(_form(text), text) if len(text) <= _MAX_CHARACTERS else text
    return " ".join(plain.translate(_QUOTES).split())


def _form(text: str) -> Literal["NFC", "NFKC"]:
    """Return the Unicode form for a text: NFKC would make 52 of 5\u00b2, and 11/2 of 1\u00bd."""
    raised = not text.isascii() and any(unicodedata.decomposition(sign).startswith(_RAISED) for sign in text)
    return "NFC" if raised else "NFKC"
