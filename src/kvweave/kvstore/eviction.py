"""What an entry is worth keeping, by one scoring function for all tiers, and which entries to evict.

value = frequency × tokens / bytes: how often the entry is retrieved, what recomputing it costs, what keeping it costs. The
frequency is the number of retrievals, the computation counted as the first. Each retrieval loses half its weight every
HALF_LIFE_S: least frequently used, with ageing. All frequencies halve together, so the order of two entries changes only
when one of them is retrieved. The stored *eviction score* is therefore log2(value) plus the half-lives since the epoch.
It needs no update as time passes, and an index over it is the order of eviction.

Knows nothing about where the entries lie, what the time is, and what happens to the victims.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.database import Database

HALF_LIFE_S = 7 * 24 * 3600.0
"""A week: a retrieval last week counts half as much as one this week."""

_PAGE_ROWS = 256


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """What eviction needs to know of an entry: its `key`, its size in `bytes`, and its eviction `score`."""

    key: str
    bytes: int
    score: float


def choose_victims(rows: Iterable[EvictionRow], bytes_to_free: int) -> list[EvictionRow]:
    """Return the entries with the lowest scores that together free at least `bytes_to_free`, lowest score first.

    Returns every row if all of them together are too little, none if `bytes_to_free` is 0 or less.
    """
    victims: list[EvictionRow] = []
    for row in sorted(rows, key=lambda row: (row.score, row.key)):
        if bytes_to_free <= 0:
            break
        victims.append(row)
        bytes_to_free -= row.bytes
    return victims


# The score


def eviction_score(frequency: float, tokens: int, size_bytes: int, now_s: float) -> float:
    """Return the score of an entry of `tokens` tokens that takes `size_bytes` in the tier.

    `frequency`, more than 0, is its aged number of retrievals at `now_s` (seconds since the epoch).
    """
    return math.log2(frequency * (tokens + 1) / (size_bytes + 1)) + now_s / HALF_LIFE_S


def after_retrievals(score: float, count: int, tokens: int, size_bytes: int, now_s: float) -> float:
    """Return the score that an entry with this score gets by `count` more retrievals."""
    added = eviction_score(count, tokens, size_bytes, now_s)
    higher, lower = max(score, added), min(score, added)
    return higher + math.log2(1.0 + 2.0 ** (lower - higher))


def frequency(score: float, tokens: int, size_bytes: int, now_s: float) -> float:
    """Return an entry's frequency at `now_s`: about its retrievals in the last half-life or two."""
    return float(2.0 ** min(1023.0, score - eviction_score(1.0, tokens, size_bytes, now_s)))


# Tables with a column `standing`, the eviction score


def scores_after_retrievals(
    database: Database, table: str, uses: Mapping[str, int], now_s: float
) -> dict[str, float]:
    """Return the scores that entries of a table get by retrievals at `now_s`, given by key; changes nothing.

    The table's columns include key, standing, tokens and bytes.
    """
    rows = database.query(
        f"SELECT key, standing, tokens, bytes FROM {table} WHERE key IN (SELECT value FROM json_each(?))",
        (json.dumps(list(uses)),),
    )
    return {key: after_retrievals(score, uses[key], tokens, size, now_s) for key, score, tokens, size in rows}


def lowest_scores(
    database: Database,
    source: str,
    values: Sequence[Any],
    total_bytes: int,
    spare: Collection[str],
) -> list[EvictionRow]:
    """Return the entries with the lowest scores that together take at least `total_bytes`, without the keys `spare`.

    `source` names a table with an index over (standing, key, bytes), and says which of its rows count; `values` are those of its
    placeholders.
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
