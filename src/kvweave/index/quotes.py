"""Finds what a question may quote from a text word for word: identifiers, checksums, passages in quotation marks, itself."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Final

_MOST_LETTERS: Final = 200
_LEAST_DIGITS: Final = 6  # a shorter number is a year, a price or a page
_AROUND: Final = (
    " \t\r\n.,;:!?\"'()[]\u3002\uff1f\uff01\u061f\u00bf\u00a1\u201c\u201d\u2018\u2019\u00ab\u00bb\u300c\u300d"
)
_QUOTED: Final = re.compile(
    r'"([^"]+)"|\u201c([^\u201d]+)\u201d|\u00ab([^\u00bb]+)\u00bb|\u300c([^\u300d]+)\u300d'
)
_WORD: Final = re.compile(r"[^\s\"\u201c\u201d\u00ab\u00bb,;!?()\[\]]+")
_JOINED: Final = re.compile(r"[^\W\d_][_.:/#@-][^\W\d_]|[a-z][A-Z]|_|::")


def quotes(question: str) -> list[str]:
    """Return what a question may quote, each once, without case: first the whole question."""
    text = unicodedata.normalize("NFKC", question)
    quoted = [part for match in _QUOTED.findall(text) for part in match]
    identifiers = [word for word in _WORD.findall(text) if _is_identifier(word.strip(_AROUND))]
    found = (part.strip(_AROUND).casefold() for part in (text, *quoted, *identifiers))
    return list(dict.fromkeys(part for part in found if 1 < len(part) <= _MOST_LETTERS))


def held(wanted: Sequence[str], text: str) -> tuple[str, ...]:
    """Return those of some quotes that a text holds, not as a part of longer words."""
    if not wanted:
        return ()
    plain = unicodedata.normalize("NFKC", text).casefold()
    return tuple(quote for quote in wanted if quote in plain and _as_words(quote).search(plain))


def is_spelled(question: str, text: str) -> bool:
    """Return whether a text holds the whole question with its capitals."""
    return unicodedata.normalize("NFKC", question).strip(_AROUND) in unicodedata.normalize("NFKC", text)


def _is_identifier(word: str) -> bool:
    digits = sum(sign.isdigit() for sign in word)
    letters = any(sign.isalpha() for sign in word)
    return digits >= _LEAST_DIGITS or (digits > 0 and letters and len(word) > 2) or bool(_JOINED.search(word))


def _as_words(quote: str) -> re.Pattern[str]:
    """Return a pattern of a quote that is no part of a longer word, in scripts that have spaces."""
    before = r"(?<![^\W_])" if _needs_edge(quote[0]) else ""
    after = r"(?![^\W_])" if _needs_edge(quote[-1]) else ""
    return re.compile(before + re.escape(quote) + after)


def _needs_edge(sign: str) -> bool:
    return sign.isalnum() and unicodedata.category(sign) != "Lo"
