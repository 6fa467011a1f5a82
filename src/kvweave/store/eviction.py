"""Whom to drop when room is needed: the entries retrieved least often, among those the longest unused.

A pure function; where the rows come from and what happens to the victims is decided elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """What eviction looks at: an entry's `key`, file size in `bytes`, retrievals and time of the last one."""

    key: str
    bytes: int
    uses: int
    last_used: float


def choose_victims(rows: Iterable[EvictionRow], bytes_to_free: int) -> list[EvictionRow]:
    """The first entries in order of `uses`, then `last_used`, that together free at least `bytes_to_free`.

    Returns:
        The victims, least used first; every row if all of them together are too little, none if
        `bytes_to_free` is 0 or less.
    """
    victims: list[EvictionRow] = []
    for row in sorted(rows, key=lambda row: (row.uses, row.last_used, row.key)):
        if bytes_to_free <= 0:
            break
        victims.append(row)
        bytes_to_free -= row.bytes
    return victims
