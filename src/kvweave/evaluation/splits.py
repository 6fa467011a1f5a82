"""Four disjoint pools of names, values, phrases and haystacks: train, dev, test, hidden.

Names, numbers and nouns belong to a split by a hash of their text, phrases and haystacks by where they are
listed: what a model was trained or a method tuned on can never turn up in the exam. `hidden` is drawn by no
training or tuning run.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

import xxhash

TRAIN, DEV, TEST, HIDDEN = SPLITS = ("train", "dev", "test", "hidden")

Phrases = Mapping[str, tuple[str, ...]]
"""Sentences with {placeholders}, by split; no sentence stands in two splits."""

_SHARES: Final = {TRAIN: 55, DEV: 15, TEST: 15, HIDDEN: 15}  # percent


def split_of(text: str) -> str:
    """The one split that a generated name or value belongs to."""
    point = xxhash.xxh64_intdigest(text.lower().encode()) % 100
    for split, share in _SHARES.items():
        point -= share
        if point < 0:
            return split
    raise AssertionError("the shares add up to 100")


@cache
def nouns(split: str) -> tuple[str, ...]:
    """Everyday things of one split, one word each, in the order of the list."""
    listed = (resources.files(__package__) / "data" / "nouns.txt").read_text("utf-8").split()
    return tuple(word for word in listed if split_of(word) == split)
