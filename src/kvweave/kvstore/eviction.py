"""What an entry is worth keeping, by one scoring function for all tiers, and whom to drop when room is needed.

score = heat × tokens / bytes: how often it is asked for, what computing it again costs, what keeping it costs. Heat is the
number of retrievals, the making counted as the first, each worth half as much after every HALF_LIFE_S: least frequently
used, with ageing. All heats halve together, so the order of two entries changes only when one of them is asked for. What
is stored is therefore the *standing*, log2(score) plus the half-lives that had passed since the epoch: it needs no
updating as time goes by, and an index over it is the order of eviction.

Pure functions; where the rows come from, what the time is and what happens to the victims is decided elsewhere.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.database import Database

HALF_LIFE_S = 7 * 24 * 3600.0
"""A week: what last week's questions were about counts half as much as what this week's are."""


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """What eviction looks at: an entry's `key`, its size in `bytes`, and its `standing`."""

    key: str
    bytes: int
    standing: float


def score(heat: float, tokens: int, size_bytes: int) -> float:
    """What keeping an entry for now is worth, per byte.

    Args:
        heat: aged number of retrievals, more than 0.
        tokens: how many tokens a pass would have to compute to make it again.
        size_bytes: what it takes in the tier.
    """
    return heat * (tokens + 1) / (size_bytes + 1)


def standing(heat: float, tokens: int, size_bytes: int, now_s: float) -> float:
    """The standing of an entry that has this heat at `now_s` (seconds since the epoch)."""
    return math.log2(score(heat, tokens, size_bytes)) + now_s / HALF_LIFE_S


def after_retrievals(before: float, count: int, tokens: int, size_bytes: int, now_s: float) -> float:
    """The standing of an entry that had the standing `before`, once it was retrieved `count` more times."""
    added = standing(count, tokens, size_bytes, now_s)
    higher, lower = max(before, added), min(before, added)
    return higher + math.log2(1.0 + 2.0 ** (lower - higher))


def heat(at: float, tokens: int, size_bytes: int, now_s: float) -> float:
    """The heat at `now_s` of an entry with the standing `at`: about its retrievals in the last half-life or two."""
    return float(2.0 ** min(1023.0, at - standing(1.0, tokens, size_bytes, now_s)))


def choose_victims(rows: Iterable[EvictionRow], bytes_to_free: int) -> list[EvictionRow]:
    """The entries of the lowest standing that together free at least `bytes_to_free`.

    Returns:
        The victims, lowest first; every row if all of them together are too little, none if `bytes_to_free` is 0 or
        less.
    """
    victims: list[EvictionRow] = []
    for row in sorted(rows, key=lambda row: (row.standing, row.key)):
        if bytes_to_free <= 0:
            break
        victims.append(row)
        bytes_to_free -= row.bytes
    return victims


_PAGE_ROWS = 256


def raised(database: Database, table: str, uses: Mapping[str, int], now_s: float) -> dict[str, float]:
    """The standing that each of these entries, if the table has it, gets by so many more retrievals; changes nothing.

    Args:
        database: has the table.
        table: its columns include key, standing, tokens and bytes.
        uses: retrievals, given by key.
        now_s: when they were.
    """
    rows = database.query(
        f"SELECT key, standing, tokens, bytes FROM {table} WHERE key IN (SELECT value FROM json_each(?))",
        (json.dumps(list(uses)),),
    )
    return {
        key: after_retrievals(before, uses[key], tokens, size, now_s) for key, before, tokens, size in rows
    }


def least_worth(
    database: Database,
    source: str,
    values: Sequence[Any],
    total_bytes: int,
    spare: Collection[str],
) -> list[EvictionRow]:
    """The entries of the lowest standing, as many as together make up at least `total_bytes`, without `spare`.

    Args:
        database: has the table.
        source: the table, with an index over (standing, key, bytes), and which of its rows count.
        values: of the placeholders in `source`.
        total_bytes: how much is wanted.
        spare: keys.
    """
    limit = _PAGE_ROWS + len(spare)
    while True:
        page = database.query(
            f"SELECT key, bytes, standing FROM {source} ORDER BY standing, key LIMIT ?", (*values, limit)
        )
        rows = [EvictionRow(*row) for row in page if row[0] not in spare]
        if len(page) < limit or sum(row.bytes for row in rows) >= total_bytes:
            return rows
        limit *= 4
