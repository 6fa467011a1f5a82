"""Decides whether two questions ask the same.

Vectors alone cannot tell: a question and its negation, or two questions that differ in a name, are often more similar than two
paraphrases. So vectors only propose, and words decide. Knows nothing about answers, documents or storage.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal

from kvweave.answer_cache.guard import ASKED_NOUNS, LITTLE, MEASURES, UNITS, Question, difference, read
from kvweave.answer_cache.mistyped import mistyped
from kvweave.answer_cache.questions import as_written, is_english, is_surely_english, is_time_sensitive
from kvweave.answer_cache.spelling import is_general, words_of_grammar
from kvweave.answer_cache.wordnet import general_words
from kvweave.text import (
    LETTERS,
    MONTHS,
    NEGATIONS,
    PREPOSITIONS,
    QUESTION_WORDS,
    clean_text,
    has_symbols,
    split_words,
)

VERSION: Final = 10
"""Version of the keys: raise it with every change that changes a key."""

Sameness = Literal["same", "near", "different"]
"""same: they ask the same. near: similar, and no rule of the guard tells them apart. different: anything else."""

_MOST_CHARACTERS: Final = 400
"""Longer questions are not searched for typing errors."""

_LEAST_COSINE: Final = 0.35
"""Keywords that are less similar to a question do not ask the same, whatever their words."""

_FEWEST_KEYWORDS: Final = 2
_UNSAID: Final = frozenset({"thing", "person", "price"})
"""Kinds of answers that keywords ask for without saying so."""

_RELATING: Final = frozenset(
    "from to into by than before after until since between against without under over behind and or".split()
)
_WORDINGS: Final = frozenset({"what is asked for", "tense", "direction", "part", "a word", "order of words"})
"""Rules of the guard that keywords need not pass: they have no verb and no order."""

_BESIDE: Final = 12
"""Number of characters before a word that tell what it is."""

_UNIT: Final = re.compile(
    r"m(?:w|wh|v|va|a|ah|hz|pa|j|n|bq|sv|ev|l|f|h|ω)|nm|[kmgtp]i?b(?:ps|it)?", re.IGNORECASE
)
"""Symbols in which capitals tell milli from mega, nanometres from newton metres, and bits from bytes."""

_COUNTED_UNIT: Final = re.compile(r"(?:\d|\bmany) [BCFGHKMST]$|\d[MG]$")
_NO_ABBREVIATIONS: Final = NEGATIONS.union(QUESTION_WORDS, "am pm kg km cm mm".split()) - {"who", "no"}
_LONGEST_ABBREVIATION: Final = 5
"""Letters of the longest word that in capitals may be an abbreviation: "URGENT" is the word, said with emphasis."""

_HOMOGRAPHS: Final = frozenset(
    "amazon apple august bill chrome excel faith fed gap go grace hope java jersey joy may met oracle outlook rose rust shell signal slack "
    "target teams turkey will windows zoom".split()
)
"""Words that mean something else with a capital, beside those of WordNet: months, products, first names."""

_DATED: Final = re.compile(
    rf"(?:\d\S*(?: of)?|\b(?:{'|'.join(sorted(PREPOSITIONS))})) \w+(?:,? ?\d)?|\w,? \d", re.IGNORECASE
)
_OPTION: Final = re.compile(r"(?:^|[\s'\"(])--?$")
_SENTENCE_END: Final = re.compile(r"[.?!:]\s+\W*$")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two questions.

    Attributes:
        sameness: same, near or different.
        kind: why they are the same: "words", "spelling" or "keywords"; "wording" if they are near; else what differs.
        errors: words in lower case that were taken for typing errors, and words that they may be errors of as well. The result holds
            only if the documents have none of them.
    """

    sameness: Sameness
    kind: str
    errors: tuple[str, ...] = ()


class Matcher:
    """The rule that says which questions may share an answer: English ones word by word, others letter by letter."""

    version: int = VERSION
    """A number below 2^48 that changes whenever the keys do."""

    def key(self, question: str) -> str:
        """Return the key that stored questions are looked up by: 32 hex digits that stand for the words of a question."""
        text = clean_text(question)
        words = plain_words(text) if is_english(text) else (as_written(text),)
        return hashlib.blake2b("\n".join(words).encode("utf-8", "replace"), digest_size=16).hexdigest()

    def is_time_sensitive(self, question: str) -> bool:
        """Return whether the answer depends on when the question is asked: it has words such as "today"."""
        return is_time_sensitive(clean_text(question))

    def compare(self, question: str, other: str, cosine: float, threshold: float) -> Comparison:
        """Compare two questions; symmetric. First the words, then typing errors, then the guard, keywords and the cosine.

        Args:
            question: any text.
            other: another one.
            cosine: between their vectors, -1..1.
            threshold: τ, the least cosine of near questions (PerCache §4.2.1), 0..1.
        """
        first, second = clean_text(question), clean_text(other)
        if is_time_sensitive(first) or is_time_sensitive(second):
            return Comparison("different", "time")
        if as_written(first) == as_written(second):
            return Comparison("same", "words")
        english = is_english(first), is_english(second)
        if not any(english):
            same = first[1:] == second[1:] and first[:1].lower() == second[:1].lower()
            return Comparison("same", "words") if same else Comparison("different", "language")
        if _capitals_differ(first, second):
            return Comparison("different", "capitals")
        if (all(english) and plain_words(first) == plain_words(second)) or first.lower() == second.lower():
            return Comparison("same", "words")
        if max(len(first), len(second)) > _MOST_CHARACTERS:
            return Comparison("different", "length")
        # What looks like another language may be errors.
        found = mistyped(first, second) if all(english) or (first + second).isascii() else None
        if found is not None:
            return Comparison("same", "spelling", found)
        if not all(english):
            return Comparison("different", "language")
        return _in_other_words(first, second, cosine, threshold)

    def same(self, question: str, other: str, cosine: float, threshold: float) -> bool:
        """Return whether two questions ask the same."""
        return self.compare(question, other, cosine, threshold).sameness == "same"


ENGLISH: Final = Matcher()


@lru_cache(maxsize=1024)
def plain_words(text: str) -> tuple[str, ...]:
    """Return the words of a cleaned text in lower case, without punctuation."""
    if has_symbols(text):  # words alone would not tell > from <, or 5 from -5
        return (text.casefold().rstrip(" .?!"),)
    return tuple(word.text for word in split_words(text)) or (text,)


def _in_other_words(first: str, second: str, cosine: float, threshold: float) -> Comparison:
    """Compare two cleaned English questions that differ in more than typing errors."""
    if cosine >= _LEAST_COSINE and _are_same_keywords(read(first), read(second)):
        differs = difference(first, second, without=_WORDINGS)
        if differs is None:
            return Comparison("same", "keywords")
    differs = difference(first, second)
    if differs is None and cosine >= threshold:
        return Comparison("near", "wording")
    return Comparison("different", differs or "distance")


def _are_same_keywords(one: Question, other: Question) -> bool:
    """Return whether one of two questions has no question word, and both have the same content words: "rehearsal date".

    Not where the words may belong together otherwise, or where the keywords leave open that they ask for a time, a place, a
    reason, a way or a number.
    """
    if bool(one.asks) == bool(other.asks):
        return False  # where neither asks, nothing but the order of the words says who did what
    asking, keywords = (one, other) if one.asks else (other, one)
    said = _UNSAID | MEASURES | {ASKED_NOUNS[word] for word in keywords.words if word in ASKED_NOUNS}
    unsaid = {kind for kind in asking.asks - said if not kind.startswith("of ")}
    if _is_counted(asking, keywords):
        unsaid -= {"count", "amount"}
    related = any(len(each.names) > 1 or not _RELATING.isdisjoint(each.texts) for each in (one, other))
    tensed = (one.tense == "past") != (other.tense == "past")
    if unsaid or related or (tensed and any(word.endswith("ing") for word in one.texts | other.texts)):
        return False
    first, second = (set(each.content) - LITTLE for each in (one, other))
    return first == second and len(first) >= _FEWEST_KEYWORDS


def _is_counted(asking: Question, keywords: Question) -> bool:
    """Return whether keywords say "number of" or "phone number", as the question does, or name the unit that it counts in."""
    kinds = [{pair for pair in pairwise(each.words) if pair[1] == "number"} for each in (asking, keywords)]
    if kinds[0] & kinds[1]:
        return True
    counted = {f"of {unit}" for unit in UNITS & set(keywords.words)} & asking.asks
    return bool(counted) or ("of" in keywords.texts and not {"number", "count"}.isdisjoint(keywords.texts))


def _capitals_differ(one: str, other: str) -> bool:
    """Return whether capitals make another word of a word that two cleaned texts share: "us" and "US", "mW" and "MW"."""
    if not (is_surely_english(one) and is_surely_english(other)):  # then each capital counts, but the first
        words = (LETTERS.findall(text[:1].lower() + text[1:]) for text in (one, other))
        pairs = zip(*words, strict=False)
        return any(here != there and here.lower() == there.lower() for here, there in pairs)
    first, second = _marked(one), _marked(other)
    shared = set(LETTERS.findall(one.lower())) & set(LETTERS.findall(other.lower()))
    marked = (each for each in first.keys() | second.keys() if each[0] in shared)
    return any(first.get(each) != second.get(each) for each in marked)


@lru_cache(maxsize=1024)
def _marked(text: str) -> Mapping[tuple[str, int], str]:
    """Return the words of a text that would mean something else in other capitals, by the word in small letters and its number."""
    found: dict[tuple[str, int], str] = {}
    if text.isupper():
        return found
    words = list(LETTERS.finditer(text))
    capital = [word[0][0].isupper() and word.start() > 0 for word in words]
    title = all(word[0][0].isupper() for word in words if word[0].lower() not in words_of_grammar())
    seen: Counter[str] = Counter()
    for n, match in enumerate(words):
        word, plain = match[0], match[0].lower()
        before = text[max(0, match.start() - _BESIDE) : match.start()]
        around = before + word + text[match.end() : match.end() + 3]
        seen[plain] += 1
        if word == plain:
            continue
        if _UNIT.fullmatch(word) or _OPTION.search(before):
            marked = True
        elif len(word) == 1:
            marked = _COUNTED_UNIT.search(before + word) is not None
        elif word.isupper():
            short = len(word) <= _LONGEST_ABBREVIATION
            marked = short and is_general(plain) and plain not in _NO_ABBREVIATIONS
        else:
            beside_name = any(capital[max(0, n - 1) : n] + capital[n + 1 : n + 2])
            dated = plain in MONTHS and _DATED.search(around) is not None
            begins = not capital[n] or _SENTENCE_END.search(before) is not None
            homograph = plain in general_words().homographs or plain in _HOMOGRAPHS
            marked = homograph and not (title or beside_name or dated or begins)
        if marked:
            found[plain, seen[plain]] = word
    return found
