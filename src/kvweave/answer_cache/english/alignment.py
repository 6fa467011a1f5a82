"""Tells whether keywords ask what a question asks, by which words of one belong to words of the other."""

from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.english.veto import Question, read
from kvweave.answer_cache.english.veto_words import COUNTED, GENERIC, MEASURED, UNITS
from kvweave.answer_cache.english.wordnet import Relation, relation

_LITTLE: Final = GENERIC | COUNTED | {"receive"}
"""Words that need no counterpart: light verbs, and how many."""

_RELATIONS: Final = frozenset(
    "from to into by than before after until since between against without under over behind and or".split()
)
"""Words that relate others, which may belong to either."""
_FEWEST: Final = 2
MEASURES: Final = frozenset(MEASURED.values()) - {"count", "name"}


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which content words of two questions belong together.

    Attributes:
        pairs: how many of each relation.
        left: the words of either that belong to none of the other.
    """

    pairs: dict[Relation, int]
    left: tuple[tuple[str, ...], tuple[str, ...]]


def align(one: Question, other: Question) -> Alignment:
    """Pair each content word of one question with at most one of the other, the closest first."""
    words = [list(dict.fromkeys(each.written)) for each in (one, other)]
    counts = dict.fromkeys(Relation, 0)
    for wanted in (Relation.SAME, Relation.DERIVED, Relation.SYNONYM):
        for word in words[0].copy():
            match = next((there for there in words[1] if _relation(word, there) is wanted), None)
            if match is not None:
                words[0].remove(word)
                words[1].remove(match)
                counts[wanted] += 1
    left = tuple(tuple(word for word in each if word not in _LITTLE) for each in words)
    return Alignment(counts, (left[0], left[1]))


def _relation(one: str, other: str) -> Relation:
    """Return how two words belong together; "how high" and "height" do as one that is derived from the other."""
    measure = MEASURED.get(one)
    if measure is not None and one != other and measure == MEASURED.get(other) and measure in (one, other):
        return Relation.DERIVED
    return relation(one, other)


def are_same_keywords(one: str, other: str) -> bool:
    """Return whether one of two cleaned questions has no question word, and either has all content words of the other and no more.

    Assumes that no certain veto tells them apart. Not where the words may belong together otherwise, or where the one without a
    question word does not say that it asks for a time, a place, a reason, a way or a number.
    """
    first, second = read(one), read(other)
    if bool(first.asks) == bool(second.asks):
        return False  # where neither asks, nothing but the order of the words says who did what
    told = {"thing", "person", "price"}
    if _is_counted(first, second):
        told.add("count")
    for each in (first, second):
        asked = each.asks - told
        unsaid = {kind for kind in asked if not kind.startswith("of ") and kind not in MEASURES}
        if unsaid or len(each.names) > 1 or not _RELATIONS.isdisjoint(each.texts):
            return False
    pasts = {each.tense == "past" for each in (first, second)}
    if len(pasts) > 1 and any(word.endswith("ing") for each in (first, second) for word in each.texts):
        return False
    aligned = align(first, second)
    measures = {MEASURED.get(word, word) for word in first.written} == {
        MEASURED.get(word, word) for word in second.written
    }
    exact = not aligned.pairs[Relation.SYNONYM] and (not aligned.pairs[Relation.DERIVED] or measures)
    return exact and aligned.left == ((), ()) and aligned.pairs[Relation.SAME] >= _FEWEST


def _is_counted(one: Question, other: Question) -> bool:
    """Return whether the question without a question word says "number of", or names the unit that the other counts in."""
    asking, keywords = (one, other) if one.asks else (other, one)
    units = {f"of {unit}" for unit in UNITS & set(keywords.words)} & asking.asks
    return bool(units) or ("of" in keywords.texts and not {"number", "count"}.isdisjoint(keywords.texts))
