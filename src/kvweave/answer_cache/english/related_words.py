"""Which English words may stand for each other: forms of one word, words derived from another, and synonyms; from WordNet.

`lab/experiments/general_words.py` made the file. It is loaded when first needed, in some hundredths of a second.
"""

import lzma
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache
from importlib import resources

from kvweave.answer_cache.english.general_words import bases, general_words


class Relation(IntEnum):
    """How two words belong together, the closest first."""

    SAME = 1
    DERIVED = 2
    SYNONYM = 3
    NONE = 4


@dataclass(frozen=True, slots=True)
class RelatedWords:
    """Words in lower case, in their base form.

    Attributes:
        often: words that texts have often.
        synonyms: each word with those that share one of its first meanings.
        derived: each word with those that it is derived from, or that are derived from it: decide, decision.
    """

    often: frozenset[str]
    synonyms: Mapping[str, frozenset[str]]
    derived: Mapping[str, frozenset[str]]

    def is_frequent(self, word: str) -> bool:
        """Return whether a word in lower case, in any form, is one that texts have often."""
        return not self.often.isdisjoint(forms(word))


@cache
def related_words() -> RelatedWords:
    """Return the words, loaded once."""
    packed = (resources.files(__package__) / "related_words.xz").read_bytes()
    often, synonyms, derived = (line.split() for line in lzma.decompress(packed).decode("ascii").splitlines())
    return RelatedWords(frozenset(often), _both_ways(synonyms), _both_ways(derived))


@lru_cache(maxsize=16384)
def relation(one: str, other: str) -> Relation:
    """Return how two words in lower case, in any form, belong together; symmetric."""
    here, there = forms(one), forms(other)
    if not here.isdisjoint(there):
        return Relation.SAME
    known = related_words()
    if _meet(known.derived, here, there):
        return Relation.DERIVED
    return Relation.SYNONYM if _meet(known.synonyms, here, there) else Relation.NONE


@lru_cache(maxsize=16384)
def forms(word: str) -> frozenset[str]:
    """Return a word in lower case and the words that it may be a form of; "longer" and "owner" are no forms of others."""
    known = general_words()
    graded = word.endswith(("er", "est", "ly"))
    found = set() if graded else {base for base in bases(word) if base in known.common}
    return frozenset({word, known.forms.get(word, word), *found})


def _meet(table: Mapping[str, frozenset[str]], here: frozenset[str], there: frozenset[str]) -> bool:
    return any(not table[word].isdisjoint(there) for word in here if word in table)


def _both_ways(pairs: list[str]) -> Mapping[str, frozenset[str]]:
    table = defaultdict(set)
    for one, _, other in (pair.partition(":") for pair in pairs):
        table[one].add(other)
        table[other].add(one)
    return {word: frozenset(others) for word, others in table.items()}
