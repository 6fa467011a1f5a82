"""The standings that a table of entries keeps, the disk's or the shared tier's: raised by retrievals, lowest first.

What a standing means is said in `eviction.py`; which tables there are is not known here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvweave.store.database import Database
from kvweave.store.eviction import EvictionRow, after_retrievals

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
