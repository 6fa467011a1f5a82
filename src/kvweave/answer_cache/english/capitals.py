"""Tells whether the capitals of two questions may give a word in both another meaning: "us" and "US", "Polish" and "polish", "mW" and "MW".

Most capitals say nothing: at the start of a sentence, of a title, or of a name that people also type without one. They tell where
either spelling is a word of its own. A text in small letters, in capitals or in Title Case does not say which of these it means.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.answer_cache.english.spelling import is_general, is_word, words_of_grammar
from kvweave.answer_cache.english.wordnet import general_words
from kvweave.languages import ENGLISH, function_word_counts, function_words

_WORD: Final = re.compile(r"[^\W\d_]+(?:/s\b)?")
_BESIDE: Final = 12
"""How many characters beside a word are looked at."""

_SENTENCE_END: Final = re.compile(r"[.?!:]\s+\W*$")
_NUMBER_BEFORE: Final = re.compile(r"(?:\d\s?|\bmany )$", re.IGNORECASE)
_ORDINAL_BEFORE: Final = re.compile(r"\d\s?(?:st|nd|rd|th)?(?: of)? $")
_NUMBER_AFTER: Final = re.compile(r",? \d")
_MONTHS: Final = frozenset("march may august".split())
"""Months that are other words in small letters."""

_OPTION_BEFORE: Final = re.compile(r"(?:^|[\s'\"(])--?$")
_ONE_MEANING: Final = frozenset("am pm kg km cm mm".split())
"""Halves of the day and units that mean one thing after a number, in any capitals: "5 KG"."""

_UNIT: Final = re.compile(r"m(?:w|wh|v|va|a|ah|hz|pa|j|n|bq|sv|ev|l|f|h|ω)|nm|[kmgtp]i?b(?:ps|/s|it)?")
"""Symbols in which capitals tell milli from mega, nanometres from newton metres, and bits from bytes."""

_LETTER_UNITS: Final = frozenset("bcfghkmst")
"""Letters that are two units, small and as capitals, behind a number and a space: "5 g" and "5 G", "300 k" and "300 K"."""

_ATTACHED_UNITS: Final = frozenset("mg")
"""Those that are also two without the space: "5g" and "5G", not "room 12b" and "12B" or a "5k" run."""

_SYMBOL_LETTERS: Final = 2
"""Letters of a word of which "Co" and "CO" are two."""

_LONGEST_ABBREVIATION: Final = 5
"""Letters of the longest word that is taken for an abbreviation too: "URGENT" is the word, said with emphasis."""

_EMPHASISED: Final = frozenset("what when where which why how".split())
"""Short words that are no abbreviations either."""

_MOSTLY: Final = 0.5
"""The share of known words above which a text without function words is English for certain."""


class Doubt(IntEnum):
    """What the capitals of two questions leave open, from nothing to all."""

    NONE = 0
    NAME = 1
    """A text that does not say so may mean the name, the abbreviation or the unit that the other one has."""
    GRAMMAR = 2
    """The same, where the other meaning is no thing at all: "it", "us"."""
    MEANING = 3
    """Both say what they mean, and mean two things."""


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A word as it is written.

    Attributes:
        text: with its capitals.
        begins: whether it begins a sentence.
        counted: whether a number precedes it, or "many".
        letter_unit: whether it is a letter alone that is a unit, counted as it is, and another one with the other case.
        dated: whether what stands beside it makes it a month, if it may be one: "3 may", "in may".
        beside_name: whether a word beside it has a capital inside a sentence.
        option: whether it is an option of a command: "-v".
    """

    text: str
    begins: bool
    counted: bool
    letter_unit: bool
    dated: bool
    beside_name: bool
    option: bool

    @property
    def is_acronym(self) -> bool:
        return len(self.text) > 1 and self.text.isupper()

    @property
    def has_capital(self) -> bool:
        """Whether its capital says something: "Polish" inside a sentence."""
        return self.text[0].isupper() and not self.begins and not self.is_acronym


@dataclass(frozen=True, slots=True)
class _Text:
    """The words of a text in small letters, each with its spellings in order; what its capitals say as a whole.

    Attributes:
        words: as above.
        shouted: whether all letters are capitals.
        small: whether no word begins with a capital.
        title: whether every word that is no function word does, and not names alone.
    """

    words: dict[str, list[_Spelling]]
    shouted: bool
    small: bool
    title: bool


class _Use(NamedTuple):
    """A word of a text."""

    text: _Text
    spelling: _Spelling


def doubt(one: str, other: str) -> Doubt:
    """Return what the capitals of two cleaned texts leave open about the words that they share; symmetric.

    In a text that is not English for certain each capital counts, but the one at the start of a sentence.
    """
    if one == other:
        return Doubt.NONE
    first, second = _read(one), _read(other)
    certain = is_surely_english(one) and is_surely_english(other)
    found = Doubt.NONE
    for word in first.words.keys() & second.words.keys():
        for here, there in zip(first.words[word], second.words[word], strict=False):
            if certain:
                found = max(found, _between(word, _Use(first, here), _Use(second, there)))
            else:
                found = max(found, _as_written(here, there))
    return found


@lru_cache(maxsize=4096)
def is_surely_english(text: str) -> bool:
    """Return whether a cleaned text has more function words of English than of any other language.

    One without function words of other languages alone is English too if most of its words are.
    """
    words = [found[0].casefold() for found in _WORD.finditer(text)]
    counts = function_word_counts(words)
    if counts.get(ENGLISH, 0) > max((n for language, n in counts.items() if language != ENGLISH), default=0):
        return True
    english = function_words()[ENGLISH]
    foreign = any(
        word not in english and not is_general(word) and function_word_counts([word]) for word in words
    )
    known = sum(map(is_word, words))
    return not foreign and text.isascii() and known >= _MOSTLY * len(words)


@lru_cache(maxsize=4096)
def _read(text: str) -> _Text:
    every = _spellings(text)
    words: dict[str, list[_Spelling]] = {}
    for word, spelling in every:
        words.setdefault(word, []).append(spelling)
    if text.isupper():
        return _Text(words, shouted=True, small=False, title=False)
    every = [(word, each) for word, each in every if len(word) > 1]  # "I" has its capital in any text
    small = not any(each.text[0].isupper() and not each.is_acronym for _, each in every)
    meaningful = [each for word, each in every if word not in words_of_grammar()]
    no_name = any(
        each.has_capital and (word in words_of_grammar() or is_general(word)) and not _is_name_too(word)
        for word, each in every
    )
    return _Text(words, False, small, no_name and all(each.text[0].isupper() for each in meaningful))


def _spellings(text: str) -> list[tuple[str, _Spelling]]:
    """Return each word of a cleaned text in small letters, with how it is written, in order."""
    found = list(_WORD.finditer(text))
    places = [
        (text[max(0, each.start() - _BESIDE) : each.start()], text[each.end() : each.end() + _BESIDE])
        for each in found
    ]
    begins = [
        _SENTENCE_END.search(before) is not None or (not n and not any(map(str.isdigit, before)))
        for n, (before, _) in enumerate(places)
    ]
    capitals = [
        len(each[0]) > 1 and each[0][0].isupper() and not begin
        for each, begin in zip(found, begins, strict=True)
    ]
    spelled = []
    for n, (each, (before, after)) in enumerate(zip(found, places, strict=True)):
        word = each[0].lower()
        spaced = after[:1] == " " and len(word) > 1
        counted = _NUMBER_BEFORE.search(before) is not None
        units = _LETTER_UNITS if before.endswith(" ") else _ATTACHED_UNITS
        numbered = _ORDINAL_BEFORE.search(before) is not None or _NUMBER_AFTER.match(after) is not None
        behind = n > 0 and found[n - 1][0].lower() in lexicon().prepositions
        beside = (n > 0 and capitals[n - 1]) or (spaced and n + 1 < len(found) and capitals[n + 1])
        dated, option = word in _MONTHS and (numbered or behind), _OPTION_BEFORE.search(before) is not None
        spelled.append(
            (word, _Spelling(each[0], begins[n], counted, counted and word in units, dated, beside, option))
        )
    return spelled


def _as_written(here: _Spelling, there: _Spelling) -> Doubt:
    one, other = here.text, there.text
    if here.begins or there.begins:
        one, other = one[:1].lower() + one[1:], other[:1].lower() + other[1:]
    return Doubt.NONE if one == other else Doubt.MEANING


def _between(word: str, one: _Use, other: _Use) -> Doubt:
    """Return what two uses of a word leave open; symmetric."""
    here, there = one.spelling, other.spelling
    shouted = one.text.shouted or other.text.shouted
    if here.text == there.text and one.text.shouted == other.text.shouted:
        return Doubt.NONE
    if (here.dated and there.dated) or (here.counted and there.counted and word in _ONE_MEANING):
        return Doubt.NONE
    if here.option and there.option:
        return Doubt.NAME if shouted else Doubt.MEANING
    if _UNIT.fullmatch(word) or (here.letter_unit and there.letter_unit):
        return _between_units(word, one, other)
    if shouted:
        plain = other if one.text.shouted else one
        return Doubt.NONE if plain.text.shouted else _in_capitals(word, plain)
    if here.is_acronym != there.is_acronym:
        return _beside_acronym(word, *((one, other) if here.is_acronym else (other, one)))
    if here.has_capital != there.has_capital and not here.begins and not there.begins:
        return _beside_name(word, *((one, other) if here.has_capital else (other, one)))
    return Doubt.NONE


def _between_units(word: str, one: _Use, other: _Use) -> Doubt:
    """Return what two spellings of a unit leave open; a letter alone is seldom one in capitals where the other text has it small."""
    texts = one.text, other.text
    shouted = any(text.shouted for text in texts)
    if shouted and len(word) == 1 and any(use.spelling.text.islower() for use in (one, other)):
        return Doubt.NONE
    vague = shouted or any(text.small or text.title for text in texts)
    return Doubt.NAME if vague else Doubt.MEANING


def _in_capitals(word: str, plain: _Use) -> Doubt:
    """Return what a word in a text of capitals leaves open beside a use in another text: most often it is the plain word."""
    if plain.text.small:
        return Doubt.NONE
    there = plain.spelling
    if there.is_acronym and _is_abbreviation_too(word):
        return Doubt.GRAMMAR if word in words_of_grammar() else Doubt.NAME
    is_name = there.has_capital and not there.beside_name and _is_name_too(word)
    return Doubt.NAME if is_name else Doubt.NONE


def _beside_acronym(word: str, acronym: _Use, plain: _Use) -> Doubt:
    """Return what a word in capitals leaves open beside another spelling of it."""
    if len(word) > _SYMBOL_LETTERS and word in lexicon().negations:
        return Doubt.NONE  # "Who must NOT come?"
    if _is_abbreviation_too(word):
        if not plain.text.small:
            return Doubt.MEANING
        return Doubt.GRAMMAR if word in words_of_grammar() else Doubt.NAME
    symbol = len(word) == _SYMBOL_LETTERS and plain.spelling.has_capital and not plain.text.title
    return Doubt.MEANING if symbol and not acronym.spelling.begins else Doubt.NONE


def _beside_name(word: str, named: _Use, plain: _Use) -> Doubt:
    """Return what a word with a capital leaves open beside the same in small letters; a name of several words is no other word."""
    if not _is_name_too(word) or named.text.title or (plain.text.small and named.spelling.beside_name):
        return Doubt.NONE
    return Doubt.NAME if plain.text.small else Doubt.MEANING


def _is_name_too(word: str) -> bool:
    """Return whether a word in small letters is a frequent one, and another one with a capital: "may", "polish"."""
    return word in lexicon().homographs or word in general_words().homographs


def _is_abbreviation_too(word: str) -> bool:
    """Return whether a word in small letters is a general one that may mean something else in capitals: "us", "pin"."""
    return len(word) <= _LONGEST_ABBREVIATION and word not in _EMPHASISED and is_general(word)
