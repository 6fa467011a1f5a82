"""The hard caps: how many bytes each tier may take, and which disk entries to drop for the next one.

A cap is fixed once and kept in the database: a share of the free space would shrink by itself as the disk fills.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from kvweave.database import Database
from kvweave.errors import EntriesInUse, InvalidRequest
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.eviction import choose_victims
from kvweave.kvstore.reports import TierName

DEFAULT_SHARE = 0.10
DEFAULT_AT_MOST_BYTES = 20 * 10**9
DEFAULT_SHARED_BYTES = 20 * 10**9

RESERVE_SHARE = 0.10
RESERVE_AT_LEAST_BYTES = 256 * 2**10
RESERVE_AT_MOST_BYTES = 64 * 2**20
"""Free space that entries never take: a share of the disk, but at most this. Without free space the catalogue could
not even record a deletion."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS store_limits (tier TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
)


def check_limit(limit_bytes: int) -> None:
    """Raise InvalidRequest for a limit that cannot be held."""
    if not 0 <= limit_bytes < 2**63:
        raise InvalidRequest(f"the store's limit is {limit_bytes} bytes; it must be between 0 and 2^63")


class Capacity:
    """The caps of all tiers, in the table `store_limits` of `database`, and room under the cap of the files in `folder`.

    The disk's default cap is a share of the free space around `folder`. Memory is not used by default: the kernel keeps
    recently read files in memory anyway, until another program needs it. Entries that `in_use` returns are never dropped,
    neither for room nor as surplus.
    """

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        folder: Path,
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._folder = folder
        self.in_use = in_use
        database.script(_SCHEMA)
        if not self._database.query("SELECT 1 FROM store_limits WHERE tier = 'disk'"):
            disk = min(int(shutil.disk_usage(folder).free * DEFAULT_SHARE), DEFAULT_AT_MOST_BYTES)
            defaults = {"device": 0, "host": 0, "disk": disk, "shared": DEFAULT_SHARED_BYTES}
            # If another process has stored its defaults since, those stay.
            self._database.execute_many(
                "INSERT OR IGNORE INTO store_limits VALUES (?, ?)", list(defaults.items())
            )

    def limit(self, tier: TierName) -> int:
        """Return a tier's cap in bytes; another process may have changed it."""
        return int(self._database.query("SELECT bytes FROM store_limits WHERE tier = ?", (tier,))[0][0])

    def record_limit(self, tier: TierName, limit_bytes: int) -> None:
        """Change a tier's cap for good, and drop nothing; raise InvalidRequest for one that cannot be held."""
        check_limit(limit_bytes)
        self._database.execute("UPDATE store_limits SET bytes = ? WHERE tier = ?", (limit_bytes, tier))

    @property
    def limit_bytes(self) -> int:
        """The disk's cap; another process may have changed it."""
        return self.limit("disk")

    def set_limit(self, limit_bytes: int) -> list[str]:
        """Change the disk's cap, drop the lowest-scored entries beyond it in one transaction, and return their files.

        Entries that running requests use stay until another entry needs the room.

        Raises:
            InvalidRequest: a negative limit.
        """
        with self._database.transaction():
            self.record_limit("disk", limit_bytes)
            return self._drop(self.excess_bytes(0))

    def excess_bytes(self, needed_bytes: int) -> int:
        """Return how much must be dropped before `needed_bytes` more fit under the cap; 0 or less if nothing."""
        return self._catalog.total_bytes() + needed_bytes - self.limit_bytes

    def disk_has_room(self, needed_bytes: int) -> bool:
        """Return whether the reserve of free space remains after `needed_bytes` more are written."""
        disk = shutil.disk_usage(self._folder)
        share = max(int(disk.total * RESERVE_SHARE), RESERVE_AT_LEAST_BYTES)
        return disk.free - needed_bytes >= min(share, RESERVE_AT_MOST_BYTES)

    def make_room(self, needed_bytes: int, spare: str = "") -> list[str]:
        """Drop the lowest-scored entries until `needed_bytes` more fit under the cap; return their files.

        Never drops the entry with key `spare`.

        Raises:
            EntriesInUse: running requests use what would have to go; rolled back with the surrounding transaction.
        """
        with self._database.transaction():
            dropped = self._drop(self.excess_bytes(needed_bytes), spare)
            if self.excess_bytes(needed_bytes) > 0:
                raise EntriesInUse(
                    f"running requests use what would have to go under the limit of {self.limit_bytes} bytes"
                )
        return dropped

    def would_admit(self, size_bytes: int, score: float) -> bool:
        """Return whether an entry of this size fits, or has a higher score than each entry that would have to go."""
        excess = self.excess_bytes(size_bytes)
        if excess <= 0:
            return True
        victims = choose_victims(self._catalog.lowest_scores(excess, frozenset(self.in_use())), excess)
        return sum(row.bytes for row in victims) >= excess and victims[-1].score < score

    def _drop(self, excess_bytes: int, spare: str = "") -> list[str]:
        if excess_bytes <= 0:
            return []
        spared = frozenset((*self.in_use(), spare))
        victims = choose_victims(self._catalog.lowest_scores(excess_bytes, spared), excess_bytes)
        return self._catalog.drop(victim.key for victim in victims)
