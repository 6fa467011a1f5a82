"""The families of questions of one split, as their file has them. Knows nothing about pairs."""

import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.splits import DEV, TEST

POOLS: Final = (DEV, TEST)


@dataclass(frozen=True, slots=True)
class Family:
    """Questions about one thing.

    Attributes:
        name: of the family.
        slots: what fills each placeholder: person, town, thing, number, ordinal, year, date, time or weekday.
        alike: questions that ask the same.
        unlike: by kind of difference, questions that do not ask what `alike` do.
        exchange: two slots whose values change roles, or nothing.
    """

    name: str
    slots: Mapping[str, str]
    alike: Sequence[str]
    unlike: Mapping[str, Sequence[str]]
    exchange: str = ""

    @property
    def phrasings(self) -> tuple[str, ...]:
        """Everything it says, placeholders unfilled."""
        return (*self.alike, *(text for texts in self.unlike.values() for text in texts))


@cache
def families(split: str) -> tuple[Family, ...]:
    """The families of a split, which share no phrasing with another split's; raises InvalidRequest if it has none."""
    if split not in POOLS:
        raise InvalidRequest(
            f"there are no look-alikes for split {split!r}; choose one of {', '.join(POOLS)}"
        )
    text = (resources.files(__package__) / f"{split}.toml").read_text("utf-8")
    found = tuple(Family(**told) for told in tomllib.loads(text)["family"])
    for family in found:
        for phrasing in family.phrasings:
            named = {name for _, name, _, _ in string.Formatter().parse(phrasing) if name is not None}
            assert named <= family.slots.keys(), (family.name, phrasing)
            # Another value makes another question only where every one of them is said.
            assert phrasing not in family.alike or named == family.slots.keys(), (family.name, phrasing)
    return found
