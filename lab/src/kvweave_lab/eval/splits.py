"""Four pools of names, values, phrases and haystacks: train, dev, test, hidden.

Disjoint are names and values *as* names and values, phrases, and the sentences of the haystacks: what one split draws
as a name or value, says as a phrase or shows as natural text, no other split does. Names, numbers and nouns belong to
a split by a hash of their text, phrases and haystacks by where they are listed.

Words as such are not: a noun that is a value of `test` may stand in a haystack or a phrase of `train` like any other
word, and names are made of the same syllables everywhere, each split having combinations of its own.

`hidden` is drawn by no training or tuning run.
"""

import itertools
import random
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

import xxhash

TRAIN, DEV, TEST, HIDDEN = SPLITS = ("train", "dev", "test", "hidden")

Phrases = Mapping[str, tuple[str, ...]]
"""Sentences with {placeholders}, by split; no sentence stands in two splits."""

_CHOICE: Final = re.compile(r"\[([^\]]*)\]")


def variants(*texts: str) -> tuple[str, ...]:
    """Sentences with every choice made: "[a|b] c" stands for "a c" and "b c"."""
    made: list[str] = []
    for text in texts:
        parts = _CHOICE.split(text)  # plain text and choices in turn
        choices = [part.split("|") if number % 2 else [part] for number, part in enumerate(parts)]
        made += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(made)


def chosen(rng: random.Random, text: str) -> str:
    """One of the sentences that `variants` makes of a text."""
    return _CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text)


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
