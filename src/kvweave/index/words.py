"""Cuts texts and questions into the words that the word index compares.

A word is indexed as it is written and by its stem. Scripts without spaces between words are cut into single characters and pairs of
neighbours. Identifiers, numbers and checksums are indexed whole and in parts. Texts and questions are cut by the same rules.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, NamedTuple

import regex

from kvweave.languages import ENGLISH, function_words, language_of

VERSION: Final = 2
"""Raise it with every change to the words of `index_words`: indexes of other versions are built again."""

COLUMN: Final = f"words_{VERSION}"
"""The column with the words of each text, in the table of chunks."""

MAX_LETTERS: Final = 200
"""Longer words are cut: a megabyte of base64 counts as one word."""

MAX_QUERY_WORDS: Final = 256

_SPACELESS: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\u30fc\u3005"
_JOINING: Final = r"[-./:@#+&'\u2019_\\]"
_LETTERS: Final = rf"[[\p{{L}}\p{{M}}\p{{N}}]--[{_SPACELESS}]]+"
_PIECE: Final = regex.compile(
    rf"(?P<spaceless>[{_SPACELESS}][{_SPACELESS}\p{{M}}]*)|(?P<word>{_LETTERS}(?:{_JOINING}{_LETTERS})*[+#]*)",
    regex.V1,
)
_PARTS: Final = regex.compile(
    rf"{_JOINING}|(?<=\p{{Ll}})(?=\p{{Lu}})|(?<=\p{{Lu}})(?=\p{{Lu}}\p{{Ll}})", regex.V1
)
_MARKED_SCRIPTS: Final = regex.compile(r"[\p{Latin}\p{Greek}\p{Hebrew}\p{Arabic}]")
_STEMMERS_BY_SCRIPT: Final = (
    ("russian", regex.compile(r"\p{Cyrillic}")),
    ("arabic", regex.compile(r"\p{Arabic}")),
    ("greek", regex.compile(r"\p{Greek}")),
    ("hindi", regex.compile(r"\p{Devanagari}")),
    ("tamil", regex.compile(r"\p{Tamil}")),
    ("armenian", regex.compile(r"\p{Armenian}")),
)
_INVISIBLE: Final = regex.compile(r"\p{Cf}+")
"""Soft hyphens, joiners and marks of direction: they stand within words."""

_LATIN: Final = regex.compile(r"\p{Latin}")
_ONLY_LETTERS: Final = regex.compile(r"[\p{L}\p{M}]+")
_DIGIT: Final = regex.compile(r"\p{N}")
_HIRAGANA: Final = regex.compile(r"\p{Hiragana}+")
_GRAMMAR: Final = regex.compile(
    r"^\p{Hiragana}+$|[\u7684\u662f\u4e86\u5417\u55ce\u5462\u5427\u4ec0\u4e48\u9ebc\u8c01\u8ab0\u54ea\u51e0\u5e7e\u4f55]"
    r"|\u65f6\u5019|\u6642\u5019|\u591a\u5c11|\u600e\u6837|\u8bf7\u95ee|\u8acb\u554f"
)
"""Pairs in Chinese or Japanese questions that carry little meaning: particles, is, what, who, when, how many."""

_SENTENCE_ENDS: Final = frozenset(".!?:;\n\r\"'([{\u201c\u00ab*#>|\u2022-\u2013\u2014\u00bf\u00a1")
_FOLDED: Final = str.maketrans(
    # Also Cyrillic io, and the forms of alef.
    "\u00f8\u0142\u0111\u0131\u0451\u0623\u0625\u0622\u2019",
    "oldi\u0435\u0627\u0627\u0627'",
    "\u0640",  # tatweel
) | {ord("\u00e6"): "ae", ord("\u0153"): "oe"}
_NAME, _STEM = "^", "~"


class _Piece(NamedTuple):
    """A word as written, and whether it is spelled like a name: with a capital inside a sentence, or in capitals."""

    text: str
    spaceless: bool
    is_name: bool


def index_words(text: str) -> str:
    """Return the words of a text for the word index, separated by spaces."""
    pieces = _pieces(text)
    language = _latin_language(pieces)
    words: list[str] = []
    for piece in pieces:
        if piece.spaceless:
            words += [*piece.text, *_pairs(piece.text)]
        else:
            words += _words_of(piece.text, language, piece.is_name).all
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class QueryWords:
    """The words of a question, in the form of the word index.

    Attributes:
        words: the words, each once.
        required: groups of words. A text that has a word of each group contains every word of the question.
    """

    words: tuple[str, ...]
    required: tuple[frozenset[str], ...]

    def all_in(self, words: str) -> bool:
        """Return whether a text with these indexed words contains every word of the question; False for an empty question."""
        held = frozenset(words.split(" "))
        return bool(self.required) and all(not group.isdisjoint(held) for group in self.required)


def query_words(question: str) -> QueryWords:
    """Return the words of a question without function words, or with them if it has no other words.

    A function word that is spelled like a name counts as a name: "The Who", "the WHO", "Is It on Monday".
    """
    pieces = _pieces(question)
    language = _latin_language(pieces)
    content: list[str] = []
    others: list[str] = []
    for piece in pieces:
        if piece.spaceless:
            (others if _HIRAGANA.fullmatch(piece.text) else content).extend(_spaceless_query(piece.text))
        else:
            words = _words_of(piece.text, language, piece.is_name)
            content += words.content
            others += words.all
    matched = tuple(dict.fromkeys(content or others))[:MAX_QUERY_WORDS]
    return QueryWords(matched, tuple(_groups(matched)))


def _groups(words: Sequence[str]) -> Iterator[frozenset[str]]:
    """Yield each word with its stem, which follows it. A word of several parts is left out, its parts are not."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if following.startswith(_STEM):
            yield frozenset((word, following))
        elif not word.startswith(_STEM) and not (_PARTS.search(word) and not _DIGIT.search(word)):
            yield frozenset((word,))


def shared_words(question: str, text: str) -> tuple[str, ...]:
    """Return the words of a question that a text contains, as they are indexed: `~` marks a stem, `^` a name."""
    held = frozenset(index_words(text).split(" "))
    return tuple(word for word in query_words(question).words if word in held)


def _pieces(text: str) -> list[_Piece]:
    plain = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    matches = list(_PIECE.finditer(plain))
    shouted = len(matches) > 2 and text.isupper()  # a sentence in capitals, which do not mark names then
    pieces = []
    for match in matches:
        word, before = match[0], plain[max(0, match.start() - 8) : match.start()].rstrip(" \t")
        within = bool(before) and before[-1] not in _SENTENCE_ENDS
        is_name = len(word) > 1 and not shouted and (word.isupper() or (within and word[0].isupper()))
        pieces.append(_Piece(word, match["spaceless"] is not None, is_name))
    return pieces


def _latin_language(pieces: Iterable[_Piece]) -> str:
    """Return the language of the words in Latin letters; English if no other language is recognised."""
    words = (
        part
        for piece in pieces
        if not piece.spaceless and _LATIN.match(piece.text)
        for part in _without_elision(piece.text.casefold())
    )
    return language_of(words) or ENGLISH


def _without_elision(word: str) -> list[str]:
    """Return the parts of a word between apostrophes, without single letters such as the s of "Anna's"."""
    return [part for part in word.split("'") if len(part) > 1] if "'" in word else [word]


# Scripts without spaces


def _spaceless_query(run: str) -> list[str]:
    """Return the pairs of a run, or its only character. Leave out pairs of mere grammar unless all pairs are."""
    if len(run) == 1:
        return [run]
    pairs = list(_pairs(run))
    return [pair for pair in pairs if not _GRAMMAR.search(pair)] or pairs


def _pairs(run: str) -> Iterator[str]:
    return (run[at : at + 2] for at in range(len(run) - 1))


# Words


class _Words(NamedTuple):
    """The indexed forms of a word, and those of them that a question looks for."""

    all: tuple[str, ...]
    content: tuple[str, ...]


@lru_cache(maxsize=100_000)
def _words_of(text: str, language: str, is_name: bool) -> _Words:
    """Return a word as written, its parts, and the stems of those parts that are not function words.

    For a function word that is spelled like a name, the content is the word with the mark of names.
    """
    text = text[:MAX_LETTERS]
    whole = _lower(text)
    parts = [_lower(part) for part in _PARTS.split(text) if part]
    if len(parts) > 1:
        parts = [part for part in parts if len(part) > 1 or part.isdigit()]  # without the s of "Anna's"
    content: list[str] = []
    others: list[str] = []
    for part in parts:
        stemmer = _stemmer_of(part, language)
        if part in _function_words(stemmer):
            others.append(_fold(part))
            continue
        content.append(_fold(part))
        if stemmer and _ONLY_LETTERS.fullmatch(part):
            content.append(_STEM + _fold(_stem(part, stemmer)))
    if [whole] != parts:
        (content if content or not others else others).append(_fold(whole))
    if is_name and whole in _all_function_words():
        content.append(_NAME + whole)
    return _Words((*content, *others), tuple(content))


def _lower(text: str) -> str:
    return text.casefold().translate(_FOLDED)


@cache
def _function_words(language: str) -> frozenset[str]:
    return frozenset(map(_lower, function_words().get(language, ())))


@cache
def _all_function_words() -> frozenset[str]:
    return frozenset[str]().union(*map(_function_words, function_words()))


def _fold(lower: str) -> str:
    """Return a word without accents, in scripts where an accent does not make another letter."""
    if lower.isascii() or not _MARKED_SCRIPTS.search(lower):
        return lower
    return "".join(sign for sign in unicodedata.normalize("NFD", lower) if unicodedata.category(sign) != "Mn")


def _stemmer_of(text: str, language: str) -> str:
    """Return the language of the stemmer for a word; empty for a script without a stemmer."""
    if _LATIN.search(text):
        return language
    return next((name for name, script in _STEMMERS_BY_SCRIPT if script.search(text)), "")


def _stem(word: str, language: str) -> str:
    import Stemmer

    # A stemmer is not safe for several threads. One without a cache is made in a microsecond.
    return str(Stemmer.Stemmer(language, 0).stemWord(word))
