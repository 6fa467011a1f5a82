"""A question as words: split, contractions undone, each with its base form. Knows single words, not what they ask."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvweave.answers.lexicon import Lexicon, lexicon

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
