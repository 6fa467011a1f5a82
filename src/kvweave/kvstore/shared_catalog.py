"""What this machine knows of the shared tier: its entries, what they were made from, and the replication queue.

The queue lists the entries that are to be put into the tier or deleted from it. It is filled in the transactions that cause the
work: a new entry is to be put, an entry made from a chunk that lost its last owner is to be deleted. So nothing is forgotten
if the tier does not answer or the process is killed. What other machines put is known from listings of the tier. Knows
nothing about servers.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from kvweave.database import Database
from kvweave.kvstore.eviction import EvictionRow, eviction_score, lowest_scores, scores_after_retrievals
from kvweave.kvstore.totals import Total, Totals, counting_triggers

Operation = Literal["put", "delete"]

PUT_TIMEOUT_S = 600.0
"""A put that was not confirmed after this long is taken for that of a killed process."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS shared_tier (namespace TEXT PRIMARY KEY, place TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS shared_entries (
        key TEXT PRIMARY KEY, namespace TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
        standing REAL NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS shared_by_standing ON shared_entries (namespace, standing, key, bytes)",
    """CREATE TABLE IF NOT EXISTS shared_sources (
        namespace TEXT NOT NULL, chunk TEXT NOT NULL, key TEXT NOT NULL,
        PRIMARY KEY (namespace, chunk, key)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS shared_sources_by_key ON shared_sources (key)",
    # The replication queue.
    """CREATE TABLE IF NOT EXISTS shared_errands (
        namespace TEXT NOT NULL, key TEXT NOT NULL, errand TEXT NOT NULL,
        PRIMARY KEY (namespace, key)) WITHOUT ROWID""",
    # The puts in progress, and since when.
    """CREATE TABLE IF NOT EXISTS shared_puts (
        namespace TEXT NOT NULL, key TEXT NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (namespace, key)) WITHOUT ROWID""",
    *counting_triggers("shared_entries", "shared", kind="namespace", uses=None),
)


@dataclass(frozen=True, slots=True)
class QueuedEntry:
    """An entry that is to be put into the tier, with its eviction `score`; made from the chunks `sources`."""

    key: str
    tokens: int
    bytes: int
    score: float
    sources: tuple[str, ...]


class SharedCatalog:
    """The tables about the shared tier in `database`, created if missing; one tier per namespace."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._totals = Totals(database)
        database.script(_SCHEMA)

    def set_location(self, namespace: str, location: str) -> None:
        """Record where the namespace's tier is; after a change, forget the old tier and queue all entries for the new one."""
        with self._database.transaction():
            if self._database.query(
                "SELECT 1 FROM shared_tier WHERE namespace = ? AND place = ?", (namespace, location)
            ):
                return
            for table in ("shared_entries", "shared_sources", "shared_errands", "shared_puts"):
                self._database.execute(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
            self._database.execute("REPLACE INTO shared_tier VALUES (?, ?)", (namespace, location))
            self._database.execute(
                "INSERT INTO shared_errands SELECT namespace, key, 'put' FROM entries WHERE namespace = ?",
                (namespace,),
            )

    # The replication queue

    def queue_puts(self, namespace: str, keys: Sequence[str]) -> None:
        """Queue entries that are new in this catalogue for the tier, if the namespace has one."""
        self._database.execute(
            """REPLACE INTO shared_errands SELECT namespace, value, 'put' FROM shared_tier, json_each(?)
               WHERE namespace = ?""",
            (json.dumps(keys), namespace),
        )

    def queue_deletions(self, namespace: str, chunks: Sequence[str]) -> None:
        """Queue the deletion of everything that was published and made from one of these chunks.

        Entries that still wait to be put are left to `begin_puts`, which asks whether the catalogue still lists them.
        """
        self._database.execute(
            """REPLACE INTO shared_errands SELECT DISTINCT namespace, key, 'delete' FROM shared_sources
               WHERE namespace = ? AND chunk IN (SELECT value FROM json_each(?))""",
            (namespace, json.dumps(chunks)),
        )

    def queued(self, namespace: str, operation: Operation, limit: int) -> list[str]:
        """Return the keys of at most `limit` entries that are queued for an operation."""
        rows = self._database.query(
            "SELECT key FROM shared_errands WHERE namespace = ? AND errand = ? ORDER BY key LIMIT ?",
            (namespace, operation, limit),
        )
        return [key for (key,) in rows]

    def queue_length(self, namespace: str) -> int:
        rows = self._database.query("SELECT COUNT(*) FROM shared_errands WHERE namespace = ?", (namespace,))
        return int(rows[0][0])

    def confirm_deletions(self, namespace: str, keys: Sequence[str]) -> None:
        with self._database.transaction():
            self.remove(namespace, keys)
            self._dequeue(namespace, "delete", keys)

    def begin_puts(self, namespace: str, keys: Sequence[str], now_s: float) -> list[QueuedEntry]:
        """Record that these entries are being put; return those that the catalogue still lists, highest score first.

        Their sources are recorded first, so that a removal in the meantime finds them.
        """
        with self._database.transaction():
            found = self._still_listed(namespace, keys)
            self._database.execute_many(
                "REPLACE INTO shared_puts VALUES (?, ?, ?)", [(namespace, one.key, now_s) for one in found]
            )
        return found

    def confirm_puts(self, namespace: str, keys: Sequence[str], stored: Sequence[QueuedEntry]) -> None:
        """Record that these queued keys are done with, and that the tier holds `stored`.

        The sources of the other keys stay known: the tier may hold those entries from an earlier time. The sources of `stored`
        may have been forgotten, if another process deleted the entries while they were put. Such an entry is queued for
        deletion unless the catalogue lists it, because it is unknown whether the put or the deletion was last.
        """
        with self._database.transaction():  # no REPLACE, whose deletions no trigger counts
            self._delete("shared_entries", namespace, [entry.key for entry in stored])
            self._database.execute_many(
                "INSERT INTO shared_entries VALUES (?, ?, ?, ?, ?)",
                [(entry.key, namespace, entry.tokens, entry.bytes, entry.score) for entry in stored],
            )
            self._dequeue(namespace, "put", keys)
            self._delete_unknown(namespace, [entry.key for entry in stored if entry.sources])
            self._delete("shared_puts", namespace, keys)

    def recover(self, namespace: str, now_s: float) -> None:
        """Settle the puts of killed processes.

        An entry that was deleted in the meantime may have reached the tier afterwards, and is then queued for deletion.
        """
        late = self._database.query(
            "SELECT key FROM shared_puts WHERE namespace = ? AND since_s <= ?",
            (namespace, now_s - PUT_TIMEOUT_S),
        )
        if late:
            keys = [key for (key,) in late]
            with self._database.transaction():
                self._delete_unknown(namespace, keys)
                self._delete("shared_puts", namespace, keys)

    # The tier's entries

    def known(self, namespace: str) -> frozenset[str]:
        """Return the keys of all entries that the tier is known to hold."""
        rows = self._database.query("SELECT key FROM shared_entries WHERE namespace = ?", (namespace,))
        return frozenset(key for (key,) in rows)

    def total(self, namespace: str) -> Total:
        """Return how much the tier is known to hold of a namespace."""
        return self._totals.by_kind("shared").get(namespace, Total())

    def score(self, key: str) -> float | None:
        """Return the eviction score of an entry that the tier is known to hold."""
        rows = self._database.query("SELECT standing FROM shared_entries WHERE key = ?", (key,))
        return float(rows[0][0]) if rows else None

    def lowest_scores(
        self, namespace: str, total_bytes: int, spare: Collection[str] = ()
    ) -> list[EvictionRow]:
        """Return the entries with the lowest scores that together take at least `total_bytes`, without `spare`."""
        source = "shared_entries WHERE namespace = ?"
        return lowest_scores(self._database, source, (namespace,), total_bytes, spare)

    def count_uses(self, uses: Mapping[str, int], now_s: float) -> None:
        """Add retrievals, given by key, whichever tier served them."""
        scores = scores_after_retrievals(self._database, "shared_entries", uses, now_s)
        self._database.execute_many(
            "UPDATE shared_entries SET standing = ? WHERE key = ?",
            [(score, key) for key, score in scores.items()],
        )

    def remove(self, namespace: str, keys: Iterable[str]) -> None:
        """Forget entries that were deleted from the tier, and their sources."""
        gone = list(keys)
        with self._database.transaction():
            self._delete("shared_entries", namespace, gone)
            self._delete("shared_sources", namespace, gone)

    def reconcile(
        self, namespace: str, known_before: Set[str], sizes: Mapping[str, int], now_s: float
    ) -> int:
        """Correct what is known by a listing of the tier, in bytes by key; return how many rows were wrong.

        `known_before` is the result of `known` before the listing. Entries put since then do not count as gone, and entries
        deleted since then do not count as new.
        """
        with self._database.transaction():
            known = dict(
                self._database.query(
                    "SELECT key, bytes FROM shared_entries WHERE namespace = ?", (namespace,)
                )
            )
            gone = (known.keys() & known_before) - sizes.keys()
            self._delete("shared_entries", namespace, list(gone))
            deleted_since = known_before - known.keys()
            new = [
                (key, size)
                for key, size in sizes.items()
                if known.get(key) != size and key not in deleted_since
            ]
            # A listing does not tell tokens: assume the tokens per byte of this machine's own entries.
            here = self._totals.of_tier("disk")
            tokens = {key: size * here.tokens // max(1, here.bytes) for key, size in new}
            self._database.execute_many(
                """INSERT INTO shared_entries VALUES (?, ?, ?, ?, ?)
                   ON CONFLICT (key) DO UPDATE SET bytes = excluded.bytes""",
                [
                    (key, namespace, tokens[key], size, eviction_score(1, tokens[key], size, now_s))
                    for key, size in new
                ],
            )
            self._totals.recount(
                "shared",
                "SELECT namespace, COUNT(*), SUM(tokens), SUM(bytes), 0 FROM shared_entries GROUP BY namespace",
            )
        return len(gone) + len(new)

    # Inside

    def _still_listed(self, namespace: str, keys: Sequence[str]) -> list[QueuedEntry]:
        """Return the entries that the catalogue lists, highest score first, and record their sources."""
        with self._database.transaction():
            rows = self._database.query(
                """SELECT key, tokens, bytes, standing,
                          (SELECT json_group_array(chunk) FROM entry_sources WHERE entry = id) FROM entries
                   WHERE key IN (SELECT value FROM json_each(?)) ORDER BY standing DESC""",
                (json.dumps(keys),),
            )
            found = [
                QueuedEntry(key, tokens, size, score, tuple(json.loads(sources)))
                for key, tokens, size, score, sources in rows
            ]
            self._database.execute_many(
                "INSERT OR IGNORE INTO shared_sources VALUES (?, ?, ?)",
                [(namespace, chunk, entry.key) for entry in found for chunk in entry.sources],
            )
        return found

    def _delete_unknown(self, namespace: str, keys: Sequence[str]) -> None:
        """Queue the deletion of entries whose sources are unknown, that nothing lists and that are not queued."""
        unknown = self._without_sources(namespace, keys)
        listed = {entry.key for entry in self._still_listed(namespace, unknown)}
        self._database.execute_many(
            "INSERT OR IGNORE INTO shared_errands VALUES (?, ?, 'delete')",
            [(namespace, key) for key in unknown if key not in listed],
        )

    def _without_sources(self, namespace: str, keys: Sequence[str]) -> list[str]:
        """Return those of these keys whose sources are not recorded."""
        rows = self._database.query(
            """SELECT value FROM json_each(?) WHERE NOT EXISTS (
                 SELECT 1 FROM shared_sources WHERE namespace = ? AND key = value)""",
            (json.dumps(keys), namespace),
        )
        return [key for (key,) in rows]

    def _delete(self, table: str, namespace: str, keys: Sequence[str]) -> None:
        self._database.execute(
            f"DELETE FROM {table} WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))",
            (namespace, json.dumps(keys)),
        )

    def _dequeue(self, namespace: str, operation: Operation, keys: Sequence[str]) -> None:
        """Remove operations from the queue, unless the opposite operation has replaced them."""
        self._database.execute(
            """DELETE FROM shared_errands WHERE namespace = ? AND errand = ?
               AND key IN (SELECT value FROM json_each(?))""",
            (namespace, operation, json.dumps(keys)),
        )
