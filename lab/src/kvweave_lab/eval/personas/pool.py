"""What users write down and ask, as the file of one split has it. Draws nothing."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final, Literal, TypeAlias

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.splits import DEV, TEST

POOLS: Final = (DEV, TEST)

Kind: TypeAlias = Literal["email", "meeting", "dialogue"]
KINDS: Final[tuple[Kind, ...]] = ("email", "meeting", "dialogue")
"""Kinds of notes: messages, minutes, and what was said during a day."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the facts of a note of one kind: a title, its first and its last sentence."""

    heading: Sequence[str]
    opening: Sequence[str]
    closing: Sequence[str]

    @property
    def phrasings(self) -> tuple[str, ...]:
        """Everything it says, placeholders unfilled."""
        return (*self.heading, *self.opening, *self.closing)


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one kind.

    Attributes:
        name: of the family.
        stated: by kind of notes, the sentences that tell a fact; one or two at a time.
        asked: questions for it, all of which ask the same.
        attributes: which list of `evaluation/attributes.py` fills {a}; nothing where there is no {a}.
        reply: the whole answer, as the reference model gives it; nothing for the value alone.
    """

    name: str
    stated: Mapping[str, Sequence[str]]
    asked: Sequence[str]
    attributes: str = ""
    reply: str = ""

    @property
    def phrasings(self) -> tuple[str, ...]:
        """Everything it says, placeholders unfilled."""
        return (*(text for texts in self.stated.values() for text in texts), *self.asked)


@dataclass(frozen=True, slots=True)
class Pool:
    """A split's frames by kind, and its families."""

    frames: Mapping[str, Frame]
    families: tuple[Family, ...]


@cache
def pool_of(split: str) -> Pool:
    """The pool of a split, which shares no phrasing with another one's; raises InvalidRequest if it has none."""
    if split not in POOLS:
        raise InvalidRequest(
            f"there are no generated users for split {split!r}; choose one of {', '.join(POOLS)}"
        )
    told = tomllib.loads((resources.files(__package__) / f"{split}.toml").read_text("utf-8"))
    frames = {kind: Frame(**frame) for kind, frame in told["frame"].items()}
    assert tuple(frames) == KINDS, split
    return Pool(frames, tuple(Family(**family) for family in told["family"]))
