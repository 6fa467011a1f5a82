"""Usage counters: look-ups are counted in memory and written to the database together, every few hundred look-ups.

A killed process loses the counts since its last write. Eviction is then a little less well informed, nothing else.
"""

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable

from kvweave.database import Database
from kvweave.errors import StoreError
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.reports import TIERS, TierName

_LOG = logging.getLogger(__name__)

FLUSH_AFTER = 512
"""Look-ups between two writes: a write waits for the disk, and a look-up must not."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS store_counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
)
_NAMES = ("hits", "misses", "damaged", "evicted", *(f"hits_{tier}" for tier in TIERS))


class UsageCounters:
    """Retrievals per entry, and the counters in the table `store_counters`. Safe to use from several threads."""

    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database = database
        self._catalog = catalog
        self._uses: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()
        database.script(_SCHEMA)

    @property
    def is_flush_due(self) -> bool:
        """Whether enough has gathered to be worth a write."""
        return self._counts["hits"] + self._counts["misses"] >= FLUSH_AFTER

    def record_hits(self, found: Iterable[tuple[str, TierName]]) -> None:
        """Count entries that were found, given by key and the tier that served them."""
        with self._guard:
            for key, tier in found:
                self._uses[key] += 1
                self._counts["hits"] += 1
                self._counts[f"hits_{tier}"] += 1

    def add(self, name: str, count: int = 1) -> None:
        """Raise a counter: misses, damaged, evicted."""
        assert name in _NAMES
        with self._guard:
            self._counts[name] += count

    def flush(self) -> None:
        """Write what has gathered, in one transaction; if that fails, keep it for the next time."""
        with self._guard:
            uses, counts = self._uses, self._counts
            self._uses, self._counts = Counter(), Counter()
        if not uses and not counts:
            return
        try:
            with self._database.transaction():
                self._catalog.count_uses(uses)
                self._database.execute_many(
                    """INSERT INTO store_counters (name, value) VALUES (?, ?)
                       ON CONFLICT (name) DO UPDATE SET value = value + excluded.value""",
                    list(counts.items()),
                )
        except BaseException:
            with self._guard:
                self._uses.update(uses)
                self._counts.update(counts)
            raise

    def try_flush(self) -> None:
        """Write what has gathered, unless the database refuses: a look-up must not fail because of its counters.

        Does nothing inside a transaction: a rollback would lose the counts, and a full disk would end the transaction.
        """
        try:
            if not self._database.in_transaction:
                self.flush()
        except (StoreError, sqlite3.Error) as error:
            _LOG.debug("usage counters not written yet: %s", error)

    def totals(self) -> dict[str, int]:
        """Return all counters since the store was created, of what has been written."""
        return dict.fromkeys(_NAMES, 0) | dict(self._database.query("SELECT name, value FROM store_counters"))
