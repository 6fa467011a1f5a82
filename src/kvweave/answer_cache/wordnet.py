"""English words from WordNet: general words, names, irregular forms, antonyms, frequent words.

`lab/experiments/general_words.py` made `general_words.xz`; `general_words.LICENSE.txt` is its licence. It is loaded when first
needed, in some hundredths of a second.
"""

import lzma
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Final

_ENDINGS: Final = (
    *(("s", ""), ("es", ""), ("ies", "y"), ("ed", ""), ("ed", "e"), ("d", ""), ("ied", "y"), ("ing", "")),
    *(("ing", "e"), ("er", ""), ("er", "e"), ("r", ""), ("ier", "y"), ("est", ""), ("st", ""), ("iest", "y")),
    *(("ly", ""), ("ily", "y")),
)
_SIBILANTS: Final = ("s", "x", "z", "ch", "sh", "o")
_SHORTEST: Final = 3  # letters of a word that an ending may be taken from
_HISSING: Final = ("s", "x", "z", "sh")
"""Endings of words that take "es" rather than "s"."""

_AFTER_VERBS: Final = ("ed", "ing", "er", "est")
"""Endings before which a last letter may be doubled."""

_Y_ALONE: Final = re.compile(r"[^aeiou]y$")
_DOUBLED: Final = re.compile(r"(?:[^aeiou]|qu|^)[aeiouy]([^aeiouwxy])\1$|[aeiou]ll$")
_TO_DOUBLE: Final = re.compile(r"(?:[^aeiouy]*|qu)[aeiou][^aeiouswxy]")
"""Words of one syllable that double their last letter before an ending."""


@dataclass(frozen=True, slots=True)
class GeneralWords:
    """Words in lower case.

    Attributes:
        common: words that are no names, in their base form.
        names: words that are only names.
        forms: irregular forms, each with its base.
        antonyms: pairs of words, each in alphabetical order.
        homographs: words that texts often have, and that mean something else with a capital.
        often: words that texts often have, in their base form.
    """

    common: frozenset[str]
    names: frozenset[str]
    forms: Mapping[str, str]
    antonyms: frozenset[tuple[str, str]]
    homographs: frozenset[str]
    often: frozenset[str]

    def is_common(self, word: str) -> bool:
        """Return whether a word in lower case is a general word or a regular or irregular form of one."""
        return word in self.forms or any(base in self.common for base in bases(word))

    def is_frequent(self, word: str) -> bool:
        """Return whether a word in lower case, in any form, is one that texts often have."""
        return not self.often.isdisjoint(forms(word))

    def are_antonyms(self, one: str, other: str) -> bool:
        """Return whether two words in lower case, in any form, mean the opposite of each other."""
        return any(
            (min(first, second), max(first, second)) in self.antonyms
            for first in (*bases(one), self.forms.get(one, one))
            for second in (*bases(other), self.forms.get(other, other))
        )


@cache
def general_words() -> GeneralWords:
    """Return the words, loaded once."""
    packed = (resources.files(__package__) / "general_words.xz").read_bytes()
    lines = lzma.decompress(packed).decode("ascii").splitlines()
    common, names, forms, antonyms, homographs, often = map(str.split, lines)
    pairs = (pair.partition(":") for pair in antonyms)
    return GeneralWords(
        frozenset(common),
        frozenset(names),
        {form: base for form, _, base in (pair.partition(":") for pair in forms)},
        frozenset((one, other) for one, _, other in pairs),
        frozenset(homographs),
        frozenset(often),
    )


def bases(word: str) -> Iterator[str]:
    """Yield a word in lower case and its possible base forms: planned → plan, hoping → hope. Some of these are not words.

    Forms follow the rules of spelling: "fireed" is no form of fire.
    """
    yield word
    for ending, more in _ENDINGS:
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < _SHORTEST:
            continue
        if ending == "es" and not stem.endswith(_SIBILANTS):
            continue
        if ending == "s" and (stem.endswith(_HISSING) or _Y_ALONE.search(stem)):
            continue
        if ending in ("d", "r", "st") and not stem.endswith("e"):
            continue
        if ending in _AFTER_VERBS and not more:
            if ending != "ing" and stem.endswith("e"):
                continue
            if _DOUBLED.search(stem):
                yield stem[:-1]
            if _TO_DOUBLE.fullmatch(stem):
                continue
        yield stem + more


@lru_cache(maxsize=16384)
def forms(word: str) -> frozenset[str]:
    """Return a word in lower case and its base forms that are words; "longer" and "owner" have no other base form."""
    known = general_words()
    graded = word.endswith(("er", "est", "ly"))
    found = set() if graded else {base for base in bases(word) if base in known.common}
    return frozenset({word, known.forms.get(word, word), *found})
