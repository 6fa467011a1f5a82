"""A question as words: split, contractions undone, each with its base form. Knows single words, not what they ask."""

import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Final


@dataclass(frozen=True)
class Lexicon:
    """Everything lexicon.toml says, in the shape in which it is asked for.

    `openings` and `closings` match what stands around a question. `prepositions` maps each to the first of its kind,
    `alike` each word to the one it is read as, with `_` between the words of an expression, of which `longest` is the
    number of words. `rewritten` are beginnings and what they come to. `past` and `participles` map irregular forms to their base.
    """

    openings: tuple[re.Pattern[str], ...]
    closings: tuple[re.Pattern[str], ...]
    empty: frozenset[str]
    articles: frozenset[str]
    be: frozenset[str]
    do: frozenset[str]
    have: frozenset[str]
    modals: frozenset[str]
    negations: frozenset[str]
    somebody: frozenset[str]
    bound_to_now: frozenset[str]
    shifting: frozenset[str]
    units_of_time: frozenset[str]
    prepositions: Mapping[str, str]
    asks: Mapping[str, str]
    measures: Mapping[str, str]
    pronouns: Mapping[str, str]
    alike: Mapping[str, str]
    longest: int
    rewritten: tuple[tuple[re.Pattern[str], str], ...]
    makers: Mapping[str, str]
    dated: frozenset[str]
    agents: Mapping[str, str]
    events: frozenset[str]
    placed: frozenset[str]
    paying: frozenset[str]
    signs: frozenset[str]
    past: Mapping[str, str]
    participles: Mapping[str, str]
    plurals: Mapping[str, str]
    verbs: frozenset[str]

    @cached_property
    def helpers(self) -> frozenset[str]:
        """Verbs that may begin a question."""
        return self.be | self.do | self.have | self.modals

    @cached_property
    def function_words(self) -> frozenset[str]:
        """Words that say how others belong together, and those that say nothing."""
        more = (self.negations, self.articles, self.prepositions, self.pronouns, self.empty)
        return self.helpers.union(*more, ("'s",))


@cache
def lexicon() -> Lexicon:
    """The lexicon, read once."""
    told = tomllib.loads(lexicon_text())
    words = told["words"]
    alike = {word: line.split()[0] for line in words["alike"] for word in line.split()}
    irregular = [form.split(":") for form in words["irregular"].split()]
    verbs = frozenset(words["verbs"].split()) | {base for base, _, _ in irregular}
    sets = (
        "empty",
        "articles",
        "be",
        "do",
        "have",
        "modals",
        "somebody",
        "negations",
        "bound_to_now",
        "shifting",
    )
    return Lexicon(
        openings=tuple(re.compile(one, re.IGNORECASE) for one in told["openings"]),
        closings=tuple(re.compile(one, re.IGNORECASE) for one in told["closings"]),
        **{name: frozenset(told[name].split()) for name in sets},
        units_of_time=frozenset(told["units_of_time"].split()),
        prepositions=_by_member(told["prepositions"]),
        asks=_by_member(told["asks"]),
        measures=_by_member(told["measures"]),
        pronouns=_by_member(told["pronouns"]),
        alike=alike,
        rewritten=tuple((re.compile(one, re.IGNORECASE), into) for one, into in told["rewritten"]),
        makers=_pairs(words["makers"]),
        dated=frozenset(words["dated"].split()),
        longest=max(word.count("_") + 1 for word in alike),
        agents=_pairs(words["agents"]),
        events=frozenset(words["events"].split()),
        paying=frozenset(words["paying"].split()),
        signs=frozenset(words["signs"].split()),
        placed=frozenset(words["placed"].split()),
        past={past: base for base, past, _ in irregular if past != base},
        participles={participle: base for base, _, participle in irregular},
        plurals=_pairs(words["plurals"]),
        verbs=verbs | {alike[word] for word in verbs & alike.keys()},
    )


def lexicon_text() -> str:
    """The file as it is."""
    return (resources.files(__package__) / "lexicon.toml").read_text("utf-8")


def _by_member(groups: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, members in groups.items() for word in members.split()}


def _pairs(text: str) -> dict[str, str]:
    return {one: other for one, _, other in (pair.partition(":") for pair in text.split())}


_WORD: Final = re.compile(
    r"""\d{4}-\d{1,2}-\d{1,2}            # a date as numbers: three kinds
      | \d{1,2}[./]\d{1,2}[./]\d{2,4}
      | \d{1,2}[:.]\d{2}(?=\s*(?:[ap]\.?m\b|h\b|o'clock)) | \d{1,2}:\d{2}(?::\d{2})?
      | \S+@\S+\w                          # an address
      | \d+(?:[.,]\d{3})*(?:[.,]\d+)?(?:st|nd|rd|th)?(?![\w-])
      | [€$£%]
      | [^\W_]+(?:[-_./'&+#][^\W_]+)*[+#]*(?:\.(?=\w))?
    """,
    re.VERBOSE,
)
_QUOTES: Final = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "`": "'"})
_APART: Final = (
    (re.compile(r"\bwon't\b", re.I), "will not"),
    (re.compile(r"\bshan't\b", re.I), "shall not"),
    (re.compile(r"\bcan(?:'t|not)\b", re.I), "can not"),
    (re.compile(r"n't\b", re.I), " not"),
    (re.compile(r"'ll\b", re.I), " will"),
    (re.compile(r"'re\b", re.I), " are"),
    (re.compile(r"'ve\b", re.I), " have"),
    (re.compile(r"'m\b", re.I), " am"),
    (re.compile(r"'d\b", re.I), " would"),
    (re.compile(r"\b(what|who|where|when|why|how|which|that|there|it|he|she|this)'s\b", re.I), r"\1 is"),
    (re.compile(r"\b([ap])\.m\b\.?", re.I), r"\1m"),
    (re.compile(r"(?<=\d)(?=(?:am|pm|km|kg|cm|mm)\b)", re.I), " "),
    (re.compile(r"(?<=s)'(?=\s)"), "'s"),  # the guests' rooms
    (re.compile(r"'s\b", re.I), " 's"),
)
_SIGNED: Final = re.compile(r"(?:^|[\s(])[-\u2212+]\s?[\d.]|\d\s+[-\u2013]\s+\d")
_OPERATORS: Final = frozenset("*/^\\")
_MEANING: Final = frozenset({"Mn", "Mc", "Me", "Sm", "So"})
"""Unicode's categories of combining marks, of relations and operators, and of pictures."""
OWNER: Final = "'s"
"""What a possessive leaves behind as a word of its own."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word.

    `text` is in lower case, `base` its base form; `form` says what an ending or an irregular form tells: past, participle,
    both, ing or nothing. `named` is whether its spelling says that it is a name: capitals where none are due, or digits.
    `comma` is whether something other than white space stands before it.
    """

    text: str
    base: str
    form: str = ""
    named: bool = False
    comma: bool = False


def plain(text: str) -> str:
    """A text as it is compared: NFKC, straight quotes, single spaces, no spaces around it."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).split())


def says_in_signs(text: str) -> bool:
    """Whether a text that `plain` made holds what words do not: relations, operators, a number's sign, marks of other scripts."""
    left = _WORD.sub(" ", text)
    return bool(_SIGNED.search(text)) or any(
        sign in _OPERATORS or unicodedata.category(sign) in _MEANING for sign in left
    )


def words(text: str) -> list[Word]:
    """The words of a text that `plain` made, contractions undone; punctuation is only seen as `Word.comma`."""
    if text.isupper():  # shouted: capitals say nothing about names
        text = text.lower()
    for contraction, full in _APART:
        text = contraction.sub(full, text)
    found, end = [], 0
    known = lexicon()
    pieces = re.finditer(rf"{re.escape(OWNER)}(?!\w)|{_WORD.pattern}", text, re.VERBOSE | re.IGNORECASE)
    for number, piece in enumerate(pieces):
        said = piece[0].rstrip(".")
        between = text[end : piece.start()].strip()
        end = piece.end()
        found.append(_word(said, number == 0, bool(between), known))
    return found


def _word(said: str, first: bool, comma: bool, known: Lexicon) -> Word:
    lower = said.lower()
    capital = said[:1].isupper() and lower not in ("i", "i'm")
    inner = any(letter.isupper() for letter in said[1:])
    digits = any(letter.isdigit() for letter in said)
    named = inner or (capital and not first) or (digits and not said[0].isdigit())
    if named or lower == OWNER:
        return Word(lower, lower, "", named, comma)
    base, form = base_form(lower, known)
    return Word(lower, base, form, False, comma)


def base_form(word: str, known: Lexicon) -> tuple[str, str]:
    """The base of a word in lower case and the form it is in; a form that no rule or list explains stays as it is."""
    past, participle = known.past.get(word), known.participles.get(word)
    if past or participle:
        form = "both" if past and participle else "past" if past else "participle"
        base = past or participle or word
        return base, "" if base == word else form
    if word in known.plurals:
        return known.plurals[word], ""
    for ending, form in (("ed", "both"), ("ing", "ing")):
        if word.endswith(ending):
            base = _verb(word[: -len(ending)], known)
            if base and base != word:
                return base, form
    if word in known.verbs:
        return word, ""
    return _singular(word), ""


def _verb(stem: str, known: Lexicon) -> str:
    """The verb that a stem without its ending belongs to, or nothing: clos → close, plann → plan, appli → apply."""
    undoubled = stem[:-1] if len(stem) > 2 and stem[-1] == stem[-2] else ""
    replaced = stem[:-1] + "y" if stem.endswith("i") else ""
    for base in (stem + "e", stem, undoubled, replaced):  # hoping is of hope, hopping of hop
        if base and base in known.verbs:
            return base
    return ""


def _singular(word: str) -> str:
    if len(word) < 4 or not word.endswith("s") or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "ches", "shes", "xes", "zzes")):
        return word[:-2]
    return word[:-1]


def join_expressions(found: Sequence[Word]) -> list[Word]:
    """The same words with every expression of the lexicon as one word, and each word as the one that it may stand for."""
    known = lexicon()
    joined: list[Word] = []
    at = 0
    while at < len(found):
        length = next(
            (n for n in range(known.longest, 1, -1) if _expression(found[at : at + n], n, known)), 1
        )
        first = found[at]
        said = _expression(found[at : at + length], length, known) if length > 1 else first.base
        joined.append(first if first.named else replace(first, base=known.alike.get(said, said)))
        at += length
    return joined


def _expression(some: Sequence[Word], length: int, known: Lexicon) -> str:
    """The words as the lexicon has them, the first in its base form; empty if it does not."""
    if len(some) < length or any(word.named for word in some):
        return ""
    said = "_".join([some[0].base, *(word.text for word in some[1:])])
    return said if said in known.alike else ""
