"""The hard cap: how many bytes the entry files may take, and making room for the next one.

The cap is settled once, when the store is made, and kept in the database: a share of the free space would
shrink by itself as the disk fills.
"""

import shutil
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave.store.catalog import Catalog
from kvweave.store.database import Database
from kvweave.store.eviction import choose_victims

DEFAULT_SHARE = 0.10
DEFAULT_AT_MOST_BYTES = 20 * 10**9

RESERVE_SHARE = 0.10
RESERVE_AT_MOST_BYTES = 64 * 2**20
"""Free space that entries never take, a share of the disk but at most this: without any, the catalogue could
not even record that something was deleted."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS store_limits (tier TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID",
)
_TIER = "disk"


def check_limit(limit_bytes: int) -> None:
    """Raise InvalidRequest for a limit that cannot be held."""
    if not 0 <= limit_bytes < 2**63:
        raise InvalidRequest(f"the store's limit is {limit_bytes} bytes; it lies between 0 and 2^63")


class Capacity:
    """The cap of the files in `folder`, in the table `store_limits` of `database`."""

    def __init__(self, database: Database, catalog: Catalog, folder: Path) -> None:
        self._database = database
        self._catalog = catalog
        self._folder = folder
        database.script(_SCHEMA)
        if not self._database.query("SELECT 1 FROM store_limits WHERE tier = ?", (_TIER,)):
            default = min(int(shutil.disk_usage(folder).free * DEFAULT_SHARE), DEFAULT_AT_MOST_BYTES)
            # Another process may have settled it since: then its figure stands.
            self._database.execute("INSERT OR IGNORE INTO store_limits VALUES (?, ?)", (_TIER, default))

    @property
    def limit_bytes(self) -> int:
        """The cap as it stands now; another process may have changed it."""
        return int(self._database.query("SELECT bytes FROM store_limits WHERE tier = ?", (_TIER,))[0][0])

    def excess_bytes(self, needed_bytes: int) -> int:
        """How much must be dropped before `needed_bytes` more fit under the cap; 0 or less if nothing."""
        return self._catalog.total_bytes() + needed_bytes - self.limit_bytes

    def disk_has_room(self, needed_bytes: int) -> bool:
        """Whether taking so much more of the disk leaves the reserve of free space untouched."""
        disk = shutil.disk_usage(self._folder)
        return disk.free - needed_bytes >= min(int(disk.total * RESERVE_SHARE), RESERVE_AT_MOST_BYTES)

    def set_limit(self, limit_bytes: int) -> list[str]:
        """Change the cap and drop the least used entries beyond it, in one transaction; returns their files.

        Raises:
            InvalidRequest: a negative limit.
        """
        check_limit(limit_bytes)
        with self._database.transaction():
            self._database.execute("UPDATE store_limits SET bytes = ? WHERE tier = ?", (limit_bytes, _TIER))
            return self.make_room(0)

    def make_room(self, needed_bytes: int, spare: str = "") -> list[str]:
        """Drop the least used entries until `needed_bytes` more fit under the cap; returns their files.

        Never drops the entry with key `spare`.
        """
        with self._database.transaction():
            excess = self.excess_bytes(needed_bytes)
            if excess <= 0:
                return []
            victims = choose_victims(self._catalog.least_used(excess, spare), excess)
            return self._catalog.drop(victim.key for victim in victims)
