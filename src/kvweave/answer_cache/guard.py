"""Finds a difference between two similar questions that changes the answer, such as another number or a negation.

The rules go by words and see a difference in case of doubt. Two questions that pass all of them may still ask different things.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Final

from kvweave import text as spelled
from kvweave.answer_cache.spelling import words_of_grammar
from kvweave.answer_cache.wordnet import bases, general_words
from kvweave.text import QUESTION_WORDS, Word, lower_words, names, numbers, split_words


def _classes(text: str) -> Mapping[str, str]:
    """Return each word of lines "class: word word" with its class."""
    lines = (line.partition(":") for line in text.strip().splitlines())
    return {word: name.strip() for name, _, words in lines for word in words.split()}


def _named_by(classes: Mapping[str, str], words: Iterable[str]) -> set[str]:
    return {classes[word] for word in words if word in classes}


RESTRICTIONS: Final = _classes("""
all: all whole entire total altogether together everybody everyone everything full
each: each every apiece
per: per
only: only just solely alone
some: some any few
half: half partly
""")
CONDITIONS: Final = frozenset("if unless while although though except without provided".split())
_EXCEPTIONS: Final = frozenset("unless except excluding apart".split())
_ORDER: Final = _classes("""
first: first 1st earliest initial initially
last: last final latest lastly
""")
_COMPARISONS: Final = _classes(
    """
more: more most highest high higher greatest greater largest larger large biggest bigger big longest longer long heaviest heavier best
 better fastest faster tallest taller deepest deeper steepest steeper thickest thicker oldest older loudest louder strongest stronger
 warmest warmer hottest hotter many much max maximum
less: less least fewest fewer lowest low lower smallest smaller small shortest shorter short lightest lighter worst worse slowest slower
 thinnest thinner youngest younger quietest quieter weakest weaker coldest colder coolest cooler little few min minimum cheapest cheaper
""".replace("\n ", " ")
)
_MEASURES: Final = _classes("""
price: price cost fee fare charge expensive cheap pay
weight: weight weigh heavy
length: length long
height: height high tall
width: width wide broad
depth: depth deep
thickness: thickness thick diameter
size: size large big
age: age old
colour: colour color shade hue
speed: speed fast quick pace
temperature: temperature hot warm cold
duration: duration
frequency: often frequency
count: number count many quantity
distance: distance far
pressure: pressure bar
volume: volume loud litre capacity
shape: shape
material: material fabric
name: name
""")
MEASURES: Final = frozenset(_MEASURES.values()) - {"count", "name"}
DEGREES: Final = frozenset(
    "many much often long come old big large tall high far heavy fast quick quickly wide deep frequently expensive".split()
)
"""Words that stand behind "how"."""

_UNIT_NAMES: Final = _classes("""
millimetre: mm
centimetre: cm
metre: m meter
km: kilometre kilometer
gram: g
kg: kilo kilogram
milligram: mg
millilitre: ml
litre: l liter
kilowatt: kw
degree: °c
percent: %
euro: € eur
dollar: $ usd
pound: £ gbp
""")
UNITS: Final = frozenset(
    "millimetre centimetre metre km inch mile hectare gram kg milligram tonne litre millilitre second minute hour day week month quarter year "
    "term night percent degree bar watt kilowatt kwh mbit gb mb euro pound dollar page line row word spoonful tablet drop dose pack packet box "
    "time visit lap piece".split()
)
TIMES: Final = frozenset(
    "second minute hour day week weekend fortnight month quarter term year season night morning afternoon evening spring summer autumn fall "
    "winter".split()
).union(spelled.MONTHS, spelled.WEEKDAYS)
_OPPOSED: Final = tuple(
    tuple(pair.split("/"))
    for pair in (
        "before/after before/once until/after until/once until/since if/unless when/unless next/last next/previous first/next to/from with/without "
        "over/under above/below above/beneath front/behind left/right inside/outside for/against lend/borrow buy/sell bring/take start/stop "
        "start/end begin/end open/close arrive/leave come/go give/get accept/refuse like/dislike win/lose rise/fall add/cut add/remove "
        "deposit/withdrawal entrance/exit full/empty easy/hard early/late safe/dangerous upload/download and/or may/must can/must old/new "
        "hot/cool warm/cold"
    ).split()
)
_OPPOSED_PARTICLES: Final = (
    *(("in", "out"), ("into", "from"), ("up", "down"), ("on", "off")),
    *combinations(("who", "when", "where", "why", "how"), 2),
)
"""Opposed only between questions that have most words in common."""

_NEGATING_PREFIXES: Final = ("un", "in", "im", "dis", "non", "mis")
_PLACING: Final = frozenset(
    "before after until since from towards without behind under below above beneath against".split()
)
ASKED_NOUNS: Final = _classes("""
time: time date day month year moment hour deadline point when weekday
place: place spot location whereabouts address where
reason: reason cause purpose why
manner: way means method manner procedure
""")
_KINDS: Final = _classes("person: who whom whose\ntime: when\nplace: where\nreason: why")
_HOW: Final = {"many": "count", "much": "amount", "often": "frequency", "come": "reason"}
_GENERIC: Final = frozenset(
    "do have get make take give put go come be say tell know find use need want kind sort type thing way name please exactly current "
    "currently actually now there then also part our my we i you it one person people somebody someone".split()
)
_EMPTY: Final = frozenset("do have please exactly current currently actually now there then also".split())
_COUNTED: Final = frozenset("many much number amount count quantity".split())
LITTLE: Final = _GENERIC | _COUNTED | {"receive"}
"""Words that a question may have more than another one: light verbs, and how many."""

_SPEAKERS: Final = ("i", "we", "you", "one", "they", "staff")
_OPENING: Final = re.compile(
    r"(?:(?:hi|hello|hey|please|sorry|so|well|ok|okay|and|also|btw|thanks)\b[,!. ]+)*"
    r"(?:(?:(?:can|could|would|will) (?:you|someone|somebody|anyone) (?:please |kindly |just )?"
    r"(?:(?:tell|show|remind|give) (?:me|us)|check|confirm|say|find out)"
    r"|(?:do|does|would) (?:you|anyone) (?:happen to )?know|(?:tell|show|remind|give) (?:me|us)"
    r"|(?:i|we)(?: would|'d) like to know|(?:i|we) (?:want|need) to know|(?:i|we) need (?=the\b)|i(?: am|'m) wondering|i wonder)\b"
    r"[ ,:]*(?:about |of )?)?",
    re.IGNORECASE,
)
_ASKED: Final = re.compile(rf"\b(?:{'|'.join(QUESTION_WORDS)}|whether|if)\b", re.IGNORECASE)
_ALL_BUT_ONE, _MOSTLY, _FEWEST_WORDS = 0.8, 0.6, 2


@dataclass(frozen=True, slots=True)
class Question:
    """The words of a question, as the rules read them.

    Attributes:
        words: base forms of all words.
        texts: all words in lower case.
        content: base forms of the words that are neither function words nor numbers, in order; a measure by its name: "price" for "cost".
        names: in lower case.
        numbers: numbers, months and weekdays, sorted.
        order: "first" or "last", where the question says so.
        asks: kinds of answers that it may ask for; empty without a question word.
        negated: whether an odd number of words negates.
        tense: past, future, present, or empty where no verb shows one.
    """

    words: tuple[str, ...]
    texts: frozenset[str]
    content: tuple[str, ...]
    names: frozenset[str]
    numbers: tuple[str, ...]
    order: frozenset[str]
    asks: frozenset[str]
    negated: bool
    tense: str


@lru_cache(maxsize=1024)
def read(text: str) -> Question:
    """Return the words of a cleaned question, without an opening such as "could you tell me"."""
    core = text[found.end() :] if (found := _OPENING.match(text)) else text
    if core != text and core and not _ASKED.search(core):
        core = f"what is {core}"  # "tell me the age of"
    words = split_words(core or text)
    texts = [word.text for word in words]
    based = [word.text if word.named else base(word.text) for word in words]
    grammar = words_of_grammar()
    content = [
        each if word.named else _MEASURES.get(each, each)
        for word, each in zip(words, based, strict=True)
        if not _is_number(word.text) and (word.named or not (word.text in grammar or each in grammar))
    ]
    named = names(core.lower() if core.isupper() else core) - grammar - spelled.TITLES
    order = {
        _ORDER[word]
        for word, after in zip(texts, [*based[1:], ""], strict=False)
        if word in _ORDER and not (word == "last" and after in TIMES)
    }
    return Question(
        tuple(based),
        frozenset(texts) | lower_words([text]),
        tuple(content),
        frozenset(word for word in named if not _is_number(word)),
        numbers(words),
        frozenset(order),
        _asked(words, based),
        sum(word in spelled.NEGATIONS or word in _EXCEPTIONS for word in texts) % 2 == 1,
        _tense(words),
    )


def _is_number(word: str) -> bool:
    return (
        word[0].isdigit() or word in spelled.NUMBERS_AND_DATES or word.removesuffix("s") in spelled.WEEKDAYS
    )


@lru_cache(maxsize=16384)
def base(word: str) -> str:
    """Return the base form of a word in lower case; a unit by its name."""
    known = general_words()
    found = known.forms.get(word, "")
    if not found and word not in known.often and not word.endswith(("er", "est", "ly", "ss")):
        found = next((each for each in bases(word) if each != word and each in known.common), "")
    return _UNIT_NAMES.get(found or word, found or word)


def _asked(words: Sequence[Word], based: Sequence[str]) -> frozenset[str]:
    """Return the kinds of answers that a question may ask for."""
    texts = [word.text for word in words]
    at = next((n for n, word in enumerate(words) if word.text in QUESTION_WORDS and not word.named), None)
    if (texts[:1] and (texts[0] in spelled.HELPERS or texts[0] == "if")) or "whether" in texts:
        return frozenset({"whether"})
    if at is None:
        inverted = any(
            word.text in spelled.HELPERS and (word.comma or before.comma) for before, word in pairwise(words)
        )
        return frozenset(
            {"whether"} if inverted or "if" in texts else ()
        )  # "On Monday, is the shop open", "I wonder if"
    kind, after = texts[at], [*texts[at + 1 :], "", ""]
    if kind in _KINDS:
        return frozenset({_KINDS[kind]})
    if kind == "how":
        if after[0] == "long":
            return frozenset({"duration", "length"})
        asked = {_HOW.get(after[0]) or _MEASURES.get(after[0]) or "manner"}
        if after[0] in ("many", "much"):
            asked |= {f"of {each}" for each in based[at + 2 : at + 3]}
        return frozenset(asked | ({"price"} if after[0] == "much" else set()))
    every = {*texts, *based}
    beside = {ASKED_NOUNS[word] for word in (*texts[:at], *texts[at + 1 : at + 5]) if word in ASKED_NOUNS}
    if any(here in _SPEAKERS and there == "do" for here, there in pairwise(texts)):
        beside.add("manner")
    measures = _named_by(_MEASURES, every)
    amount = {"amount"} if measures & {"price", "volume", "weight", "count"} or "total" in every else set()
    person = {"person"} if after[0] and after[0] not in spelled.HELPERS and not beside else set()
    return frozenset({"thing", *beside, *measures, *amount, *person, *(f"of {each}" for each in based)})


def _tense(words: Sequence[Word]) -> str:
    """Return the tense of the first verb that shows one."""
    texts = [word.text for word in words if not word.named] + [""]
    for text, after in pairwise(texts):
        if text in ("will", "shall") or (text == "going" and after == "to"):
            return "future"
        if text in ("did", "was", "were", "had") or _is_past(text):
            return "past"
        if text in ("has", "have"):
            return "past" if "been" in texts or any(map(_is_past, texts)) else "present"
        if text in ("do", "does", "am") or (text in ("is", "are") and after != "going"):
            return "present"
    return ""


def _is_past(word: str) -> bool:
    known = general_words()
    if known.forms.get(word) in _VERBS:
        return True
    regular = word.endswith("ed") and not word.endswith("eed")
    return regular and any(each != word and each in known.common for each in bases(word))


_VERBS: Final = frozenset(
    "begin break bring build buy catch choose come draw drink drive eat fall feel find fly get give go grow hear hold keep know lay lead leave "
    "lend lose make mean meet pay ride ring rise run say see sell send shake shoot show sing sit sleep speak spend stand steal swim take teach "
    "tell think throw understand wake wear win write".split()
)


def difference(one: str, other: str, without: Collection[str] = ()) -> str | None:
    """Return the name of the first rule, of those not left out, that finds a difference between two cleaned questions, or None."""
    first, second = read(one), read(other)
    return next(
        (name for name, differs in RULES.items() if name not in without and differs(first, second)), None
    )


def opposed(one: set[str], other: set[str]) -> bool:
    """Return whether a word in lower case of one set means the opposite of one of the other."""
    if any((here in one and there in other) or (there in one and here in other) for here, there in _OPPOSED):
        return True
    known = general_words()
    return any(
        known.are_antonyms(here, there) or _is_negated_form(here, there) or _is_negated_form(there, here)
        for here in one
        for there in other
    )


def _is_negated_form(word: str, plain: str) -> bool:
    return any(word == prefix + plain for prefix in _NEGATING_PREFIXES)


def _shared(one: Question, other: Question) -> float:
    """Return the share of content words that both questions have, 0..1."""
    first, second = set(one.content), set(other.content)
    return 2 * len(first & second) / max(1, len(first) + len(second))


def _too_short(one: Question, other: Question) -> bool:
    return min(len(set(each.content) - _GENERIC) for each in (one, other)) < _FEWEST_WORDS


def _names_differ(one: Question, other: Question) -> bool:
    return not (one.names <= other.texts and other.names <= one.texts)


def _asked_differs(one: Question, other: Question) -> bool:
    return bool(one.asks and other.asks) and one.asks.isdisjoint(other.asks)


def _tense_differs(one: Question, other: Question) -> bool:
    return bool(one.tense and other.tense) and (one.tense == "past") != (other.tense == "past")


def _restriction_differs(one: Question, other: Question) -> bool:
    first, second = (_named_by(RESTRICTIONS, each.texts) for each in (one, other))
    if "per" in first | second:  # "per lesson" is "each lesson", or "a lesson"
        first, second = first - {"per", "each"}, second - {"per", "each"}
    return first != second


def _comparison_differs(one: Question, other: Question) -> bool:
    first, second = (_named_by(_COMPARISONS, each.texts) for each in (one, other))
    return bool(first and second) and first != second


def _opposites(one: Question, other: Question) -> bool:
    firsts, seconds = {*one.words, *one.texts}, {*other.words, *other.texts}
    first, second = firsts - seconds, seconds - firsts
    particles = any(
        (here in first and there in second) or (there in first and here in second)
        for here, there in _OPPOSED_PARTICLES
    )
    return (particles and _shared(one, other) > _MOSTLY) or opposed(first, second)


def _measure_differs(one: Question, other: Question) -> bool:
    first, second = (_named_by(_MEASURES, each.words) for each in (one, other))
    if first and second and first.isdisjoint(second):
        return True
    units = [set(each.words) & UNITS for each in (one, other)]
    if units[0] - units[1] and units[1] - units[0]:
        return True
    per = [
        {after for word, after in pairwise(each.words) if word in ("per", "each", "every")}
        for each in (one, other)
    ]
    return bool(per[0] and per[1]) and per[0].isdisjoint(per[1])


def _direction_differs(one: Question, other: Question) -> bool:
    """Return whether words that both questions have change places, or what is "from" in one is "to" in the other."""
    for here, there in ((one, other), (other, one)):
        sources = {after for word, after in _phrases(here) if word == "from"}
        goals = {after for word, after in _phrases(there) if word in ("to", "into", "for", "towards")}
        if sources & goals:
            return True
    first, second = ({after: word for word, after in _phrases(each)} for each in (one, other))
    if any(
        first[word] != second[word] and {first[word], second[word]} & _PLACING
        for word in first.keys() & second.keys()
    ):
        return True
    counts = [Counter(each.content) for each in (one, other)]
    # "the price of the lamp", "how much the lamp costs"; but not "who paid Anna", "whom did Anna pay"
    measures = set() if "person" in one.asks & other.asks else set(_MEASURES.values())
    shared = [
        word for word in one.content if counts[0][word] == counts[1][word] == 1 and word not in measures
    ]
    if not (one.asks and other.asks):
        return False
    places = {word: other.content.index(word) for word in shared}
    moved = any(places[here] > places[there] for here, there in combinations(shared, 2))
    return moved and _shared(one, other) > _MOSTLY


def _phrases(question: Question) -> list[tuple[str, str]]:
    """Return each preposition with the content word that follows it."""
    content, found = set(question.content), []
    for at, word in enumerate(question.words):
        after = next((each for each in question.words[at + 1 : at + 4] if each in content), "")
        if after and word in spelled.PREPOSITIONS:
            found.append((word, after))
    return found


def _part_is_left_out(one: Question, other: Question) -> bool:
    """Return whether one question says all that the other says, and more."""
    first, second = (set(each.content) - _GENERIC - _COUNTED for each in (one, other))
    return bool(one.asks and other.asks) and (first < second or second < first)


def _word_differs(one: Question, other: Question) -> bool:
    """Return whether the questions are equal but for a word or two."""
    first = set(one.content) - set(other.content) - _EMPTY - _COUNTED
    second = set(other.content) - set(one.content) - _EMPTY - _COUNTED
    shared = len(set(one.content) & set(other.content))
    few = max(len(first), len(second)) <= max(2, shared // 2) or _shared(one, other) > _MOSTLY
    return bool(first and second) and few


def _order_of_words_differs(one: Question, other: Question) -> bool:
    """Return whether the questions consist of the same words in another order."""
    return bool(one.asks and other.asks) and _shared(one, other) >= _ALL_BUT_ONE


RULES: Final[Mapping[str, Callable[[Question, Question], bool]]] = {
    "too short": _too_short,
    "names": _names_differ,
    "numbers": lambda one, other: one.numbers != other.numbers,
    "negation": lambda one, other: one.negated != other.negated,
    "what is asked for": _asked_differs,
    "tense": _tense_differs,
    "order": lambda one, other: one.order != other.order,
    "restriction": _restriction_differs,
    "comparison": _comparison_differs,
    "opposites": _opposites,
    "measure or unit": _measure_differs,
    "direction": _direction_differs,
    "part": _part_is_left_out,
    "a word": _word_differs,
    "order of words": _order_of_words_differs,
}
"""Each rule with what it finds. They are tried in this order."""
