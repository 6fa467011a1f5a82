"""Tells in what two questions differ that are near but not certainly the same: the differences that change an answer.

Each check goes by words and finds a difference in case of doubt. What passes them all may still be another question.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Final

from kvweave.answer_cache.english.dates import fold_dates
from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.answer_cache.english.normalize import strip_frame
from kvweave.answer_cache.english.spelling import is_word
from kvweave.answer_cache.english.veto_words import (
    ASKED,
    ASKING,
    CONDITIONS,
    COUNTED,
    DIRECTION,
    EMPTY,
    GENERIC,
    HOW,
    MEASURED,
    NEGATIONS,
    NOUNS_ASKED,
    ONE,
    OPPOSED,
    OPPOSED_PARTICLES,
    ORDER,
    PLACING,
    SCOPE,
    SEASONS,
    SENTENCE_START,
    TITLES,
    UNIT_NAMES,
    UNITS,
)
from kvweave.answer_cache.english.wordnet import general_words
from kvweave.answer_cache.english.words import Word, join_expressions, split_words
from kvweave.languages import ENGLISH, function_words


@dataclass(frozen=True, slots=True)
class Question:
    """The words of a question and what the checks go by.

    Attributes:
        words: all, in base form.
        texts: all, as they are written, in lower case.
        content: those that are no function words, in order; of a measure, its name: "price" for "cost".
        written: the same in base form.
        names: in lower case.
        numbers: numbers and dates, in a standard form.
        order: whether it says first or last.
        asks: classes of answers that it may ask for; empty for a question without a question word.
        negated: whether an odd number of words negates.
        tense: past, future, present, or empty where no helping verb tells.
    """

    words: tuple[str, ...]
    texts: frozenset[str]
    content: tuple[str, ...]
    written: tuple[str, ...]
    names: frozenset[str]
    numbers: tuple[str, ...]
    order: frozenset[str]
    asks: frozenset[str]
    negated: bool
    tense: str


@lru_cache(maxsize=4096)
def read(text: str) -> Question:
    """Return the words of a cleaned question, without a frame such as "could you tell me"."""
    text, requested = strip_frame(text, lexicon())
    if requested and not ASKED.search(text):
        text = f"what is {text}"  # "tell me the age of"
    spoken = fold_dates(split_words(text))
    joined = join_expressions(spoken)
    known = lexicon()
    fillers = known.function_words | function_words()[ENGLISH] | set(ASKING)
    words = tuple(UNIT_NAMES.get(word.base, word.base) for word in joined)
    meaningful = [word for word in joined if word.named or not (word.text in fillers or word.base in fillers)]
    content = tuple(map(_one_form, meaningful))
    written = tuple(UNIT_NAMES.get(word.base, word.base) for word in meaningful)
    starts = {match[0].lower() for match in SENTENCE_START.finditer(text)}
    names = frozenset(
        word.text
        for word in spoken
        if word.named
        and word.base[:1] not in ("#", "@")
        and not (word.text in fillers or word.text in TITLES or (word.text in starts and is_word(word.text)))
    )
    ones = tuple("#1" for _ in ONE.finditer(text))  # "one" itself is often no number
    numbers = ones + tuple(
        sorted(
            word.base.removesuffix("th")
            for word in spoken
            if word.base[:1] in ("#", "@") and word.base not in ("#1", "#1th")
        )
    )
    first = frozenset({"1"} if any(word.base == "#1th" for word in spoken) else ())
    order = first | frozenset(
        ORDER[word.text]
        for word, after in zip(spoken, [*spoken[1:], None], strict=False)
        if word.text in ORDER
        and not (after and word.text == "last" and after.base in known.units_of_time | SEASONS)
    )
    texts = [word.text for word in spoken]
    negated = sum(text in NEGATIONS for text in texts) % 2 == 1
    return Question(
        words,
        frozenset(texts),
        content,
        written,
        names,
        numbers,
        order,
        _asked(spoken),
        negated,
        _tense(spoken),
    )


def _one_form(word: Word) -> str:
    """Return the base of a word; "high" and "height", "mm" and "millimetre" have one form."""
    if word.named:
        return word.base
    return MEASURED.get(word.base, UNIT_NAMES.get(word.base, word.base))


def veto(one: str, other: str) -> str | None:
    """Return the first difference found between two cleaned questions that changes the answer; None without one."""
    first, second = read(one), read(other)
    return next((name for name, differs in _CHECKS if differs(first, second)), None)


def certain_veto(one: str, other: str) -> str | None:
    """Return what `veto` returns, of the differences that are none of DOUBTS."""
    first, second = read(one), read(other)
    return next((name for name, differs in _CHECKS if name not in DOUBTS and differs(first, second)), None)


def says_otherwise(one: str, other: str) -> bool:
    """Return whether a difference that changes the answer is seen in two cleaned questions, not merely too little in common."""
    first, second = read(one), read(other)
    checks = (differs for name, differs in _CHECKS if name not in _VAGUE)
    return any(differs(first, second) for differs in (*checks, _condition_differs))


def negates_otherwise(one: str, other: str) -> bool:
    """Return whether one of two questions has an odd number of negations and the other has not: "not for nothing"."""
    return _negation_differs(read(one), read(other))


def limits_otherwise(one: str, other: str) -> bool:
    """Return whether one of two questions is about all, some, half or only those that it names, and the other is not: "just members"."""
    return _scope_differs(read(one), read(other))


def are_opposed(one: str, other: str) -> bool:
    """Return whether a word of one cleaned text means the opposite of a word of the other."""
    return _opposites(read(one), read(other))


def kind_of_pair(one: str, other: str) -> str:
    """Return "keywords" if either of two cleaned texts has no question word, else "wording"."""
    return "wording" if read(one).asks and read(other).asks else "keywords"


def _asked(words: Sequence[Word]) -> frozenset[str]:
    at = next((n for n, word in enumerate(words) if word.text in ASKING and not word.named), None)
    first = words[0].text if words else ""
    if (
        first in lexicon().helpers
        or first in ("if", "whether")
        or any(word.text == "whether" for word in words)
    ):
        return frozenset({"whether"})
    if at is None:
        return frozenset({"whether"} if _is_inverted(words) else ())
    kind, after = words[at].text, [word.text for word in words[at + 1 : at + 3]]
    if kind in ("who", "whom", "whose"):
        return frozenset({"person"})
    if kind == "how":
        first = after[0] if after else ""
        named = HOW.get(first) or MEASURED.get(first) or "manner"
        counted = (
            {f"of {word.base}" for word in words[at + 2 : at + 3]} if first in ("many", "much") else set()
        )
        if first == "much":
            counted.add("price")
        return frozenset({named, *counted} if first != "long" else {"duration", "length"})
    if kind in ("when", "where", "why"):
        return frozenset({{"when": "time", "where": "place", "why": "reason"}[kind]})
    every = {word.base for word in words} | {word.text for word in words}
    asked = {MEASURED[word] for word in every & MEASURED.keys()}
    beside = [word.text for word in (*words[:at], *words[at + 1 : at + 5])]
    near = {NOUNS_ASKED[word] for word in beside if word in NOUNS_ASKED}
    is_noun = bool(after) and after[0] not in lexicon().helpers
    amount = {"amount"} if asked & {"price", "volume", "weight", "count"} or "total" in every else set()
    counted = {f"of {UNIT_NAMES.get(word.base, word.base)}" for word in words}
    does = ("i", "we", "you", "one", "they", "staff")
    if any(here in does and there == "do" for here, there in pairwise(word.text for word in words)):
        near.add("manner")
    return frozenset(
        {"thing", *near, *asked, *amount, *counted} | ({"person"} if is_noun and not near else set())
    )


def _is_inverted(words: Sequence[Word]) -> bool:
    """Return whether a verb follows a phrase in front: "On Monday, is the shop open"."""
    helpers = lexicon().helpers
    return any(word.text in helpers and before.comma for before, word in pairwise(words)) or any(
        word.text in helpers and word.comma for word in words
    )


def _tense(words: Sequence[Word]) -> str:
    """Return the tense of the first verb that shows one."""
    for word, after in zip(words, [*(word.text for word in words[1:]), ""], strict=False):
        if word.named:
            continue
        if word.text in ("will", "shall") or (word.text == "going" and after == "to"):
            return "future"
        if word.text in ("did", "was", "were", "had") or word.form in ("past", "both"):
            return "past"
        if word.text in ("has", "have") and any(each.form in ("participle", "both") for each in words):
            return "past"
        if word.text in ("do", "does", "am", "has", "have") or (
            word.text in ("is", "are") and after != "going"
        ):
            return "present"
    return ""


def _differing(one: Question, other: Question) -> tuple[set[str], set[str]]:
    first, second = set(one.words), set(other.words)
    return first - second, second - first


def _alike(one: Question, other: Question) -> float:
    """Return which share of the content words both questions have, 0..1."""
    first, second = set(one.content), set(other.content)
    return 2 * len(first & second) / max(1, len(first) + len(second))


def _by_class(words: Sequence[str], classes: Mapping[str, str]) -> set[str]:
    return {classes[word] for word in words if word in classes}


def _too_short(one: Question, other: Question) -> bool:
    """Return whether a question says too little to tell it from others."""
    return min(len(set(each.content) - GENERIC) for each in (one, other)) < _FEWEST_WORDS


def _names_differ(one: Question, other: Question) -> bool:
    return not (one.names <= other.texts and other.names <= one.texts)


def _numbers_differ(one: Question, other: Question) -> bool:
    return one.numbers != other.numbers


def _order_differs(one: Question, other: Question) -> bool:
    return one.order != other.order


def _negation_differs(one: Question, other: Question) -> bool:
    return one.negated != other.negated


def _asked_differs(one: Question, other: Question) -> bool:
    return bool(one.asks and other.asks) and one.asks.isdisjoint(other.asks)


def _tense_differs(one: Question, other: Question) -> bool:
    return bool(one.tense and other.tense) and (one.tense == "past") != (other.tense == "past")


def _scope_differs(one: Question, other: Question) -> bool:
    first, second = (_by_class(each.words, SCOPE) for each in (one, other))
    if "per" in first | second:  # "per lesson" is "each lesson", or "a lesson"
        first, second = first - {"per", "each"}, second - {"per", "each"}
    return first != second


def _comparison_differs(one: Question, other: Question) -> bool:
    first, second = (_by_class(each.words, DIRECTION) for each in (one, other))
    return bool(first and second) and first != second


def _opposites(one: Question, other: Question) -> bool:
    first, second = _differing(one, other)
    if _alike(one, other) > _MOSTLY_SHARED and any(
        {*pair} <= {*first, *second} and not {*pair} <= first and not {*pair} <= second
        for pair in OPPOSED_PARTICLES
    ):
        return True
    return opposed_words(first, second)


def opposed_words(first: set[str], second: set[str]) -> bool:
    """Return whether a word in lower case of one set means the opposite of one of the other."""
    for pair in OPPOSED:
        for here, there in (pair, pair[::-1]):
            if here in first and there in second:
                return True
    known = general_words()
    return any(
        known.are_antonyms(here, there) or _is_negated_form(here, there) or _is_negated_form(there, here)
        for here in first
        for there in second
    )


def _is_negated_form(word: str, plain: str) -> bool:
    return any(word == prefix + plain for prefix in ("un", "in", "im", "dis", "non", "mis"))


def _measure_differs(one: Question, other: Question) -> bool:
    first, second = (_by_class(each.words, MEASURED) for each in (one, other))
    if first and second and first.isdisjoint(second):
        return True
    units = [set(each.words) & UNITS for each in (one, other)]
    return bool(units[0] - units[1]) and bool(units[1] - units[0])


def _per_differs(one: Question, other: Question) -> bool:
    every = [
        {after for word, after in pairwise(each.words) if word in ("per", "each", "every")}
        for each in (one, other)
    ]
    return bool(every[0] and every[1]) and every[0].isdisjoint(every[1])


def _roles_differ(one: Question, other: Question) -> bool:
    """Return whether words that both have change places, or what is "from" in one is "to" in the other."""
    for here, there in ((one, other), (other, one)):
        sources = {after for word, after in _phrases(here) if word == "from"}
        goals = {after for word, after in _phrases(there) if word in ("to", "into", "for", "towards")}
        if sources & goals:
            return True
    placed = [{after: word for word, after in _phrases(each)} for each in (one, other)]
    if any(
        placed[0][word] != placed[1][word] and {placed[0][word], placed[1][word]} & PLACING
        for word in placed[0].keys() & placed[1].keys()
    ):
        return True
    counts = [Counter(each.content) for each in (one, other)]
    measures = set(MEASURED.values())  # "the price of the lamp", "how much the lamp costs"
    shared = [
        word for word in one.content if counts[0][word] == counts[1][word] == 1 and word not in measures
    ]
    if len(shared) < 2 or not (one.asks and other.asks):
        return False
    places = {word: other.content.index(word) for word in shared}
    moved = any(places[here] > places[there] for here, there in combinations(shared, 2))
    return moved and _alike(one, other) > _MOSTLY_SHARED


def _phrases(question: Question) -> list[tuple[str, str]]:
    """Return each preposition with the content word that follows it."""
    content, found = set(question.content), []
    for at, word in enumerate(question.words):
        after = next((each for each in question.words[at + 1 : at + 4] if each in content), "")
        if after and word in lexicon().prepositions:
            found.append((word, after))
    return found


def _dropped(one: Question, other: Question) -> bool:
    """Return whether one question says something more, and all that the other says: it is about a part, or narrower."""
    if not (one.asks and other.asks):
        return False
    first, second = (set(each.content) - GENERIC - COUNTED for each in (one, other))
    return first < second or second < first


def _condition_differs(one: Question, other: Question) -> bool:
    """Return whether one question has a condition, or says where, when or for whom, and the other says nothing instead."""
    if one.texts & CONDITIONS != other.texts & CONDITIONS:
        return True
    for here, there in ((one, other), (other, one)):
        more = {after for _, after in _phrases(here)} - set(there.content) - COUNTED - GENERIC
        more -= NOUNS_ASKED.keys() | MEASURED.keys()
        if more and set(there.content) - GENERIC - COUNTED - MEASURED.keys() <= set(here.content):
            return True
    return False


def _exchanged(one: Question, other: Question) -> bool:
    """Return whether the questions are equal but for a word or two, which are no synonyms."""
    first = set(one.content) - set(other.content) - EMPTY - COUNTED
    second = set(other.content) - set(one.content) - EMPTY - COUNTED
    shared = len(set(one.content) & set(other.content))
    few = max(len(first), len(second)) <= max(2, shared // 2) or _alike(one, other) > _MOSTLY_SHARED
    return bool(first and second) and few


def _ordered_otherwise(one: Question, other: Question) -> bool:
    """Return whether two questions consist of the same words, and yet are not read alike."""
    return bool(one.asks and other.asks) and _alike(one, other) >= _ALL_BUT_ONE


_VAGUE: Final = frozenset({"too short", "part", "a word", "how the words belong together"})
"""The checks that find a difference between many rewordings of one question."""
DOUBTS: Final = (
    *("what is asked for", "tense", "direction or roles", "part", "a word"),
    "how the words belong together",
)
"""The differences that `veto` finds by rules which find some between rewordings too, as far as they are worded otherwise."""
_ALL_BUT_ONE, _FEWEST_WORDS, _MOSTLY_SHARED = 0.8, 2, 0.6
_CHECKS: Final[tuple[tuple[str, Callable[[Question, Question], bool]], ...]] = (
    ("too short", _too_short),
    ("names", _names_differ),
    ("numbers", _numbers_differ),
    ("negation", _negation_differs),
    ("what is asked for", _asked_differs),
    ("tense", _tense_differs),
    ("order", _order_differs),
    ("scope", _scope_differs),
    ("comparison", _comparison_differs),
    ("opposites", _opposites),
    ("measure or unit", _measure_differs),
    ("per what", _per_differs),
    ("direction or roles", _roles_differ),
    ("part", _dropped),
    ("a word", _exchanged),
    ("how the words belong together", _ordered_otherwise),
)
