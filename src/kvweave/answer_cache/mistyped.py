"""Finds out whether two questions differ only in typing errors.

The stored question shows the intended word. A word in no list, one letter away from it, is accepted as a typing error. It is rejected if
another word is likelier, or if it could be an opposite, a number, a negation or a direction. Equally likely words are
listed too; the caller checks that the documents lack all of them. Numbers and codes are never corrected. In names only two swapped letters are.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvweave.answer_cache.guard import CONDITIONS, DEGREES, RESTRICTIONS, UNITS, opposed
from kvweave.answer_cache.spelling import (
    LEAST_LETTERS,
    LEAST_LETTERS_OF_TWO,
    OMITTED,
    OTHER,
    SHORT,
    SWAPPED,
    TWO,
    differ_by_prefix,
    edits,
    is_compound,
    is_general,
    is_swapped,
    is_usual,
    is_word,
    kind_of,
    kind_of_any,
    words_near,
    words_of_grammar,
)
from kvweave.answer_cache.wordnet import general_words
from kvweave.text import (
    HELPERS,
    NEGATIONS,
    NUMBERS_AND_DATES,
    OWNER,
    PREPOSITIONS,
    QUESTION_WORDS,
    Word,
    has_symbols,
    split_words,
)

_LONG: Final = 5  # letters of a number with another error than two letters swapped; of a word with any other letter that others have too
_NAME: Final = (
    6  # letters of a name in which two may be swapped; one less in a known place, a date or a number
)
_MOST_RIVALS: Final = 8
_MOST_PART: Final = 4  # how many words may lose their spaces at a place

_UNMARKED: Final = {
    each.replace("'", ""): tuple(word.text for word in split_words(each))
    for each in "what's where's who's how's when's that's there's don't doesn't didn't isn't aren't wasn't weren't can't couldn't won't "
    "wouldn't shouldn't hasn't haven't hadn't i'm i've i'd i'll you've you're you'd you'll they're they've they'd they'll we've we're we'd "
    "we'll it's it'll he's he'd he'll she's she'd she'll here's".split()
}
"""Contractions without their apostrophe, with their words."""

_CONFUSED: Final = tuple(
    tuple(tuple(side.split("_")) for side in pair.split(":"))
    for pair in "there:their there:they_are their:they_are its:it_is your:you_are to:too whether:weather loose:lose a:an advice:advise "
    "practice:practise than:then where:were".split()
)
"""Words that are typed for each other, of which only one fits at a place; the last two only where `_fits`."""

_ASKING_OR_RELATING: Final = frozenset(
    "what when where which does could would should shall against among because during from into onto since than until upon with".split()
)
"""Question words, prepositions and helping verbs; a rare word in their place is a typing error."""

_WITH_TENSE: Final = frozenset(
    "am is are was were does did has had could might must shall should will would".split()
)
"""Helping verbs that begin what is asked: "how long did we stay"."""

_MOST_COUNTED: Final = 4
"""How many words what is counted may have, with the verb behind it: "cubic metres did"."""

_COMPARATIVES: Final = frozenset("more less rather other fewer better worse sooner".split())


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of two words in their questions.

    Attributes:
        begins: whether they begin the questions.
        bare: whether they follow a helping verb, as names do.
        measured: whether they follow "how" and precede a verb with a tense, so that they measure or count: "how long did".
    """

    begins: bool = False
    bare: bool = False
    measured: bool = False


def mistyped(one: str, other: str) -> tuple[str, ...] | None:
    """Return the typing errors by which two cleaned texts differ, or None if they are equal or differ in more; symmetric.

    Words in lower case: those that were taken for errors, and other words that they could equally be typing errors of.
    """
    if (has_symbols(one) or has_symbols(other)) and _signs(one) != _signs(other):
        return None
    first, second = split_words(one), split_words(other)
    return _differing(first, second)


def _signs(text: str) -> str:
    """Return the signs and digits of a text, without common punctuation."""
    return "".join(sign for sign in text if not (sign.isalpha() or sign.isspace() or sign in "?!.,'\""))


def _differing(one: Sequence[Word], other: Sequence[Word]) -> tuple[str, ...] | None:
    """Compare two texts word by word; a word may be typed twice, and spaces may be misplaced."""
    errors: list[str] = []
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i].text == other[j].text:
            i, j = i + 1, j + 1
            continue
        if _is_unsaid(one, i) or _is_unsaid(other, j):
            i, j = i + _is_unsaid(one, i), j + _is_unsaid(other, j)
            continue
        moved = _spaced(one[i:], other[j:]) or _confused(one, i, other, j)
        if moved:
            i, j = i + moved[0], j + moved[1]
            continue
        found = _slip(one[i], other[j], _place(one, i, other, j))
        if found is None:
            return None
        errors += found
        i, j = i + 1, j + 1
    if i < len(one) or j < len(other) or one == other:
        return None
    return tuple(dict.fromkeys(errors))


def _is_unsaid(words: Sequence[Word], at: int) -> bool:
    """Return whether a word is an accidental repetition, or the apostrophe of a possessive: "the members' fee"."""
    text, before = words[at].text, words[at - 1].text if at else ""
    if text == OWNER:
        return before.endswith("s")
    return text == before and text in words_of_grammar() - {"that", "had", "is"}


def _spaced(one: Sequence[Word], other: Sequence[Word]) -> tuple[int, int] | None:
    """Return the numbers of first words of both texts that have the same letters and other spaces ("howmuch", "doe sthe"), or None."""
    for word, words, turned in ((one[0], other, False), (other[0], one, True)):
        full = _UNMARKED.get(word.text)
        if full and tuple(each.text for each in words[: len(full)]) == full:
            return (len(full), 1) if turned else (1, len(full))
        if _is_owner(word, words):
            return (2, 1) if turned else (1, 2)
    for size in range(2, 2 * _MOST_PART):
        for many in range(max(1, size - _MOST_PART), min(size, _MOST_PART + 1)):
            here, there = one[:many], other[: size - many]
            if (len(here), len(there)) != (many, size - many) or not _same_letters(here, there):
                continue
            return many, size - many
    return None


def _is_owner(word: Word, words: Sequence[Word]) -> bool:
    """Return whether `word` is the possessive at the start of `words` without its apostrophe: "Annas", "the members fee"."""
    if len(words) < 2 or words[1].text != OWNER:
        return False
    owner = words[0].text
    return word.text == f"{owner}s" and not (words[0].named and word.text in general_words().names)


def _same_letters(one: Sequence[Word], other: Sequence[Word]) -> bool:
    """Return whether words have the same letters, and the spaces between them change nothing."""
    parts = [[part for word in each for part in word.text.split("-")] for each in (one, other)]
    if "".join(parts[0]) != "".join(parts[1]) or not all(part.isalpha() for part in (*parts[0], *parts[1])):
        return False
    if any(word.named for word in (*one, *other)) and parts[0] != parts[1]:  # else only a hyphen differs
        apart = max(one, other, key=len)
        return (
            len(one) != len(other)
            and not all(word.named for word in apart)
            and not is_word(min(parts, key=len)[0])
        )
    if not all(map(is_word, (*parts[0], *parts[1]))):
        return all(map(is_word, parts[0])) or all(map(is_word, parts[1]))
    functions = words_of_grammar()
    return all(len(part) >= SHORT and part not in functions for part in (*parts[0], *parts[1]))


def _confused(one: Sequence[Word], i: int, other: Sequence[Word], j: int) -> tuple[int, int] | None:
    """Return the numbers of words at two places that are often confused with each other ("its", "it is"), or None."""
    for pair in _CONFUSED:
        for here, there in (pair, pair[::-1]):
            found = _texts(one[i : i + len(here)]) == here and _texts(other[j : j + len(there)]) == there
            if found and _fits(pair[0][0], one[:i], one[i + len(here) :]):
                return len(here), len(there)
    return None


def _texts(words: Sequence[Word]) -> tuple[str, ...]:
    return tuple(word.text for word in words)


def _fits(word: str, before: Sequence[Word], after: Sequence[Word]) -> bool:
    """Return whether only `word` fits between two parts of a text, and not the word that it is confused with."""
    if word == "than":
        return bool(before) and (before[-1].text.endswith("er") or before[-1].text in _COMPARATIVES)
    if word == "where":
        return not before and bool(after) and after[0].text in HELPERS
    return True


def _place(one: Sequence[Word], i: int, other: Sequence[Word], j: int) -> _Place:
    """Return the place of words `i` and `j` of two texts; symmetric."""
    before = {words[at - 1].text for words, at in ((one, i), (other, j)) if at}
    return _Place(
        begins=not i and not j,
        bare=not before.isdisjoint(HELPERS),
        measured="how" in before and (_is_inverted(one[i + 1 :]) or _is_inverted(other[j + 1 :])),
    )


def _is_inverted(words: Sequence[Word]) -> bool:
    """Return whether a helping verb follows within a few words of the same clause: "days did we stay"."""
    texts = _texts(words[:_MOST_COUNTED])
    clause = next((n for n, text in enumerate(texts) if text in QUESTION_WORDS or text == "that"), len(texts))
    return not _WITH_TENSE.isdisjoint(texts[:clause])


def _slip(one: Word, other: Word, place: _Place) -> tuple[str, ...] | None:
    """Return the errors, as `mistyped` does, if one of two words is a typing error of the other, or None."""
    parts = [word.text.split("-") for word in (one, other)]
    if len(parts[0]) == len(parts[1]) > 1:
        unlike = [pair for pair in zip(*parts, strict=True) if pair[0] != pair[1]]
        return _of_two(*unlike[0], one.named or other.named, _Place()) if len(unlike) == 1 else None
    return _of_two(one.text, other.text, one.named or other.named, place)


@lru_cache(maxsize=1024)
def _of_two(one: str, other: str, named: bool, place: _Place) -> tuple[str, ...] | None:
    first, second = _without_accents(one), _without_accents(other)
    if first.isascii() and first == second:
        return (min(one, other, key=lambda word: not word.isascii()),) if named else ()
    if one.replace("'", "") == other.replace("'", ""):
        return ()
    if not all(word.isascii() and word.isalpha() for word in (first, second)):
        return None
    for typed, meant, text in ((first, second, one), (second, first, other)):
        if _is_variant(typed, meant):
            return ()
        rivals = _rivals(typed, meant, named, place)
        if rivals is not None:
            return (text, *rivals)
    return None


def _rivals(typed: str, meant: str, named: bool, place: _Place) -> tuple[str, ...] | None:
    """Return the words that `typed` could equally be a typo of, or None if it is no typo of `meant`."""
    if is_word(typed):
        if _is_rare_slip(typed, meant, named):
            return ()
        if named or not _is_out_of_place(typed, meant, place):
            return None
    if meant in NUMBERS_AND_DATES:
        return () if _is_slip_of_number(typed, meant) else None
    known = is_general(meant) or meant in CONDITIONS or is_usual(meant)
    if not known and (named or not is_compound(meant) or is_compound(typed)):
        least = _NAME - (meant in general_words().names)
        return () if is_swapped(typed, meant) and typed[0] == meant[0] and len(meant) >= least else None
    kind = kind_of(typed, meant)
    if kind is None or differ_by_prefix(typed, meant):
        return None
    strict = named or (
        place.bare and meant not in words_of_grammar() and not meant.endswith(("s", "ing", "ed"))
    )
    doubtful = strict and kind > (SWAPPED if named else OMITTED)
    if doubtful and (named or kind > OTHER or len(meant) < _LONG or words_near(typed, OTHER) - {meant}):
        return None
    rivals = []
    for word, other in _others(typed, meant, kind, place).items():
        likelier = other <= kind - 2 and (other == SWAPPED or is_usual(word))
        if _is_plural(word, meant):
            continue
        asks_otherwise = meant in QUESTION_WORDS and word in QUESTION_WORDS
        if likelier or (other <= kind and (asks_otherwise or _is_decisive(word, meant))):
            return None
        if other <= kind + 1 and _are_opposed(meant, word):
            return None
        if other <= kind:
            rivals.append(word)
    usual = [word for word in rivals if is_usual(word)]
    most = 0 if kind == OTHER and len(meant) < _LONG and len(typed) == len(meant) else _MOST_RIVALS
    if len(usual) > most:
        return None
    return tuple(sorted(rivals, key=lambda word: (word not in usual, word))[:_MOST_RIVALS])


def _others(typed: str, meant: str, kind: int, place: _Place) -> dict[str, int]:
    """Return the other words that `typed` may be a typo of, each with the kind of error.

    A function word can only stand in place of another function word, and a word behind "how" only for another such word.
    """
    functions = words_of_grammar()
    fit = functions | NUMBERS_AND_DATES
    if meant not in functions:
        unfit: frozenset[str] = functions - NEGATIONS - RESTRICTIONS.keys() - NUMBERS_AND_DATES
    elif place.begins and (meant in QUESTION_WORDS or meant in HELPERS):
        fit, unfit = HELPERS.union(QUESTION_WORDS), frozenset()
    else:
        unfit = frozenset()
    able = words_near(typed, kind) - unfit
    if place.measured and meant in DEGREES:
        able &= DEGREES
    kinds = {
        word: kind_of(typed, word) for word in (able & fit if meant in functions else able) if word != meant
    }
    return {word: other for word, other in kinds.items() if other is not None}


def _is_plural(one: str, other: str) -> bool:
    """Return whether one of two words is the plural of the other, which seldom changes an answer."""
    short, long = sorted((one, other), key=len)
    return long in (f"{short}s", f"{short}es")


def _is_decisive(word: str, meant: str) -> bool:
    """Return whether `word` in place of `meant` changes an answer wherever it stands."""
    if word in NUMBERS_AND_DATES or word in NEGATIONS or word in RESTRICTIONS or word in CONDITIONS:
        return True
    return word in QUESTION_WORDS or word in PREPOSITIONS or {word, meant} <= UNITS


def _are_opposed(one: str, other: str) -> bool:
    """Return whether two words are opposites, or two sides of one action: employer, employee."""
    if opposed({one}, {other}):
        return True
    stems = [
        {word.removesuffix(ending) for ending in ("ee", "er", "or") if word.endswith(ending)}
        for word in (one, other)
    ]
    return not stems[0].isdisjoint(stems[1])


def _is_slip_of_number(typed: str, meant: str) -> bool:
    """Return whether `typed` is a typo of this number or part of a date and of no other."""
    kind = kind_of_any(typed, meant)
    if kind is None or len(meant) < {SWAPPED: SHORT + 1, TWO: LEAST_LETTERS_OF_TWO}.get(kind, _LONG):
        return False
    most = 2 if kind == TWO else 1
    return not any(edits(typed, other, most) <= most for other in NUMBERS_AND_DATES - {meant})


def _is_rare_slip(typed: str, meant: str, named: bool) -> bool:
    """Return whether a rare word is a frequent one with two letters swapped ("sene"), or "form" stands for "from"."""
    if named or typed[0] != meant[0] or typed in words_of_grammar() or not is_swapped(typed, meant):
        return False
    if meant in PREPOSITIONS:
        return len(meant) >= LEAST_LETTERS
    if typed in general_words().names or typed in NUMBERS_AND_DATES:
        return False
    return general_words().is_frequent(meant) and not general_words().is_frequent(typed)


def _is_out_of_place(typed: str, meant: str, place: _Place) -> bool:
    """Return whether `typed`, though a word, cannot stand where the other question has `meant`.

    A content word cannot stand for a function word ("more tan one"), nor a helping verb behind "how" ("how may days did it take").
    """
    if typed in NUMBERS_AND_DATES - {"may"}:
        return False
    if typed in HELPERS:
        return place.measured and meant in DEGREES
    if typed in words_of_grammar():
        return False
    return meant in _ASKING_OR_RELATING and not is_usual(typed)


def _is_variant(typed: str, meant: str) -> bool:
    """Return whether `typed` is a wrong regular form of the same word: "payed", "budgetted"."""
    base = general_words().forms.get(meant)
    if base and typed == f"{base}ed" and not is_general(typed.removesuffix("d")):
        return True
    for ending in ("ed", "ing", "er"):
        if typed.endswith(ending) and meant.endswith(ending):
            stem = min(typed, meant, key=len).removesuffix(ending)
            doubled = max(typed, meant, key=len) == stem + stem[-1:] + ending
            return (
                doubled
                and len(stem) > SHORT
                and is_general(stem)
                and f"{stem}e" not in general_words().common
            )
    return False


def _without_accents(word: str) -> str:
    return "".join(sign for sign in unicodedata.normalize("NFD", word) if unicodedata.category(sign) != "Mn")
