"""Splits a question into words, undoes contractions, and finds each word's base form. Knows single words only."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvweave.answer_cache.english.lexicon import Lexicon, lexicon

OWNER: Final = "'s"
"""The possessive ending, which becomes a word of its own."""

_WORD: Final = re.compile(
    r"""\d{4}-\d{1,2}-\d{1,2}            # a date as numbers, in three forms
      | \d{1,2}[./]\d{1,2}[./]\d{2,4}
      | \d{1,2}[:.]\d{2}(?=\s*(?:[ap]\.?m\b|h\b|o'clock)) | \d{1,2}:\d{2}(?::\d{2})?
      | (?<!\S)\S[^\s@]*+@\S+\w           # an address; written so that it takes linear time
      | \d+(?:[.,]\d{3})*(?:[.,]\d+)?(?:st|nd|rd|th)?(?![\w-])
      | [€$£%]
      | [^\W_]+(?:[-_./'&+#][^\W_]+)*[+#]*(?:\.(?=\w))?
    """,
    re.VERBOSE,
)
_CONTRACTIONS: Final = (
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
_SIGNED_NUMBER: Final = re.compile(r"(?:^|[\s(])[-\u2212+]\s?[\d.]|\d\s+[-\u2013]\s+\d")
_MINUS_BEHIND: Final = re.compile(r"[^\W_][-\u2013](?![\w-])")
"""A grade or a blood group: "A-" is not "A"."""
_OPERATORS: Final = frozenset("*/^\\")
_SYMBOL_CATEGORIES: Final = frozenset({"Mn", "Mc", "Me", "Sm", "So"})
"""Unicode categories of combining marks, of relations and operators, and of pictures."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word.

    Attributes:
        text: in lower case.
        base: base form, in lower case.
        form: what the ending or irregular form shows: past, participle, both, ing, or empty.
        named: whether the spelling marks a name: a capital inside a sentence, or digits.
        comma: whether something other than white space precedes it.
    """

    text: str
    base: str
    form: str = ""
    named: bool = False
    comma: bool = False


def has_symbols(text: str) -> bool:
    """Return whether a cleaned text has meaningful symbols beside its words: relations, operators, a number's sign."""
    rest = _WORD.sub(" ", text)
    return bool(_SIGNED_NUMBER.search(text) or _MINUS_BEHIND.search(text)) or any(
        sign in _OPERATORS or unicodedata.category(sign) in _SYMBOL_CATEGORIES for sign in rest
    )


def split_words(text: str) -> list[Word]:
    """Return the words of a cleaned text, contractions undone; of punctuation only `Word.comma` remains."""
    if text.isupper():  # all in capitals: they mark no names
        text = text.lower()
    for contraction, full in _CONTRACTIONS:
        text = contraction.sub(full, text)
    words: list[Word] = []
    end = 0
    known = lexicon()
    pieces = re.finditer(rf"{re.escape(OWNER)}(?!\w)|{_WORD.pattern}", text, re.VERBOSE | re.IGNORECASE)
    for piece in pieces:
        between = text[end : piece.start()].strip()
        end = piece.end()
        words.append(_word(piece[0].rstrip("."), not words, bool(between), known))
    return words


def join_expressions(words: Sequence[Word]) -> list[Word]:
    """Return the words with each expression of the lexicon as one word, and synonyms replaced by their first one.

    Two synonyms in one question mean two things ("from the shop to the store"): these stay.
    """
    known = lexicon()
    joined = _joined(words, known)
    first_of = {word.base: known.synonyms.get(word.base, word.base) for word in joined if not word.named}
    uses = Counter(first_of.values())
    return [
        word if word.named or uses[first_of[word.base]] > 1 else replace(word, base=first_of[word.base])
        for word in joined
    ]


def _joined(words: Sequence[Word], known: Lexicon) -> list[Word]:
    joined: list[Word] = []
    at = 0
    while at < len(words):
        length = next(
            (n for n in range(known.longest, 1, -1) if _expression(words[at : at + n], n, known)), 1
        )
        first = words[at]
        base = _expression(words[at : at + length], length, known) if length > 1 else first.base
        joined.append(first if first.named else replace(first, base=base))
        at += length
    return joined


def base_form(word: str, known: Lexicon) -> tuple[str, str]:
    """Return the base and the form of a word in lower case; a word that no rule or list explains is its own base."""
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


def _word(text: str, first: bool, comma: bool, known: Lexicon) -> Word:
    lower = text.lower()
    capital = text[:1].isupper() and lower not in ("i", "i'm")
    inner = any(letter.isupper() for letter in text[1:])
    digits = any(letter.isdigit() for letter in text)
    named = inner or (capital and not first) or (digits and not text[0].isdigit())
    if named or lower == OWNER:
        return Word(lower, lower, "", named, comma)
    base, form = base_form(lower, known)
    return Word(lower, base, form, False, comma)


def _verb(stem: str, known: Lexicon) -> str:
    """Return the verb of a stem without its ending, or nothing: clos → close, plann → plan, appli → apply."""
    undoubled = stem[:-1] if len(stem) > 2 and stem[-1] == stem[-2] else ""
    replaced = stem[:-1] + "y" if stem.endswith("i") else ""
    for base in (stem + "e", stem, undoubled, replaced):  # hoping → hope, hopping → hop
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


def _expression(words: Sequence[Word], length: int, known: Lexicon) -> str:
    """Return the words joined as the lexicon spells the expression, first word in its base form; empty if it has none."""
    if len(words) < length or any(word.named for word in words):
        return ""
    joined = "_".join([words[0].base, *(word.text for word in words[1:])])
    return joined if joined in known.synonyms else ""
