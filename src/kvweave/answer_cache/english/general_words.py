"""General English words, names and antonyms, from WordNet; `general_words.LICENSE.txt` is its licence.

`lab/experiments/general_words.py` made the file. It is loaded when first needed, in some hundredths of a second.
"""

import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

_ENDINGS: Final = (
    *(("s", ""), ("es", ""), ("ies", "y"), ("ed", ""), ("ed", "e"), ("d", ""), ("ied", "y"), ("ing", "")),
    *(("ing", "e"), ("er", ""), ("er", "e"), ("r", ""), ("ier", "y"), ("est", ""), ("st", ""), ("iest", "y")),
    *(("ly", ""), ("ily", "y")),
)
_SIBILANTS: Final = ("s", "x", "z", "ch", "sh", "o")
_SHORTEST: Final = 3  # letters of a word that an ending may be taken from


@dataclass(frozen=True, slots=True)
class GeneralWords:
    """Words in lower case.

    Attributes:
        common: words that are no names, in their base form.
        names: words that are only names.
        forms: irregular forms, each with its base.
        antonyms: pairs of words, each in alphabetical order.
        homographs: words that texts often have, and that mean something else with a capital.
    """

    common: frozenset[str]
    names: frozenset[str]
    forms: Mapping[str, str]
    antonyms: frozenset[tuple[str, str]]
    homographs: frozenset[str]

    def is_common(self, word: str) -> bool:
        """Return whether a word in lower case is a general word or a regular or irregular form of one."""
        return word in self.forms or any(base in self.common for base in bases(word))

    def is_known(self, word: str) -> bool:
        """Return whether a word in lower case is a general word, a form of one, or a name."""
        return self.is_common(word) or word in self.names

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
    common, names, forms, antonyms, homographs = (
        line.split() for line in lzma.decompress(packed).decode("ascii").splitlines()
    )
    pairs = (pair.partition(":") for pair in antonyms)
    return GeneralWords(
        frozenset(common),
        frozenset(names),
        {form: base for form, _, base in (pair.partition(":") for pair in forms)},
        frozenset((one, other) for one, _, other in pairs),
        frozenset(homographs),
    )


def bases(word: str) -> Iterator[str]:
    """Yield a word in lower case, and what may be its base form: planned → plann, plan, …; some are no words."""
    yield word
    for ending, more in _ENDINGS:
        stem = word.removesuffix(ending)
        if stem == word or len(stem) < _SHORTEST:
            continue
        if ending == "es" and not stem.endswith(_SIBILANTS):
            continue
        if ending in ("d", "r", "st") and not stem.endswith("e"):
            continue
        yield stem + more
        if not more and len(stem) > _SHORTEST and stem[-1] == stem[-2] and ending[0] in "eir":
            yield stem[:-1]
