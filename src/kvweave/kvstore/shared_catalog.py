"""What this catalogue knows of the shared tier: what it holds, made from what, and what is still to be done there.

The work to do is part of the transactions that cause it: a new entry is to be published, one made from a chunk that lost its
last owner is to be deleted. So nothing is forgotten when the tier does not answer or the process is killed. What other
machines put there is known from listings, as far as it was listed. Knows nothing about servers.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from kvweave.database import Database
from kvweave.kvstore.eviction import EvictionRow, least_worth, raised, standing
from kvweave.kvstore.totals import Total, Totals, counted

Errand = Literal["put", "delete"]

PUT_WITHIN_S = 600.0
"""Whoever has not said by then what became of an entry that he was about to put was killed."""

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
    """CREATE TABLE IF NOT EXISTS shared_errands (
        namespace TEXT NOT NULL, key TEXT NOT NULL, errand TEXT NOT NULL,
        PRIMARY KEY (namespace, key)) WITHOUT ROWID""",
    # What is being put, and since when.
    """CREATE TABLE IF NOT EXISTS shared_puts (
        namespace TEXT NOT NULL, key TEXT NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (namespace, key)) WITHOUT ROWID""",
    *counted("shared_entries", "shared", kind="namespace", uses=None),
)


@dataclass(frozen=True, slots=True)
class Publishable:
    """An entry that is to be published, made from the chunks `sources`."""

    key: str
    tokens: int
    bytes: int
    standing: float
    sources: tuple[str, ...]


class SharedCatalog:
    """The tables about the shared tier in `database`, made if they are not there; one tier to a namespace."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._totals = Totals(database)
        database.script(_SCHEMA)

    # The tier

    def settle(self, namespace: str, place: str) -> None:
        """Name the tier of a namespace; of another one than before, nothing is known, and all there is gets published."""
        with self._database.transaction():
            if self._database.query(
                "SELECT 1 FROM shared_tier WHERE namespace = ? AND place = ?", (namespace, place)
            ):
                return
            for table in ("shared_entries", "shared_sources", "shared_errands", "shared_puts"):
                self._database.execute(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
            self._database.execute("REPLACE INTO shared_tier VALUES (?, ?)", (namespace, place))
            self._database.execute(
                "INSERT INTO shared_errands SELECT namespace, key, 'put' FROM entries WHERE namespace = ?",
                (namespace,),
            )

    # What is to be done there

    def publish(self, namespace: str, keys: Sequence[str]) -> None:
        """Entries that are new in this catalogue are to be put into the tier, if the namespace has one."""
        self._database.execute(
            """REPLACE INTO shared_errands SELECT namespace, value, 'put' FROM shared_tier, json_each(?)
               WHERE namespace = ?""",
            (json.dumps(keys), namespace),
        )

    def withdraw_made_from(self, namespace: str, chunks: str) -> None:
        """What was published and made from one of these chunks (a JSON list) is to be deleted from the tier.

        What waits to be published is left to `announce`, which asks whether the catalogue still lists it.
        """
        self._database.execute(
            """REPLACE INTO shared_errands SELECT DISTINCT namespace, key, 'delete' FROM shared_sources
               WHERE namespace = ? AND chunk IN (SELECT value FROM json_each(?))""",
            (namespace, chunks),
        )

    def errands(self, namespace: str, errand: Errand, most: int) -> list[str]:
        """The keys of some entries that this is to be done with."""
        rows = self._database.query(
            "SELECT key FROM shared_errands WHERE namespace = ? AND errand = ? ORDER BY key LIMIT ?",
            (namespace, errand, most),
        )
        return [key for (key,) in rows]

    def waiting(self, namespace: str) -> int:
        """How much is to be done."""
        return int(
            self._database.query("SELECT COUNT(*) FROM shared_errands WHERE namespace = ?", (namespace,))[0][
                0
            ]
        )

    def deleted(self, namespace: str, keys: Sequence[str]) -> None:
        """These are deleted from the tier, as was to be done."""
        with self._database.transaction():
            self.remove(namespace, keys)
            self._done(namespace, "delete", keys)

    def announce(self, namespace: str, keys: Sequence[str], now_s: float) -> list[Publishable]:
        """Those of these entries that the catalogue still lists, the most worth keeping first, which are put from now on.

        It is known what they are made from, so that no removal that comes meanwhile overlooks them.
        """
        with self._database.transaction():
            found = self._still_listed(namespace, keys)
            self._database.execute_many(
                "REPLACE INTO shared_puts VALUES (?, ?, ?)", [(namespace, one.key, now_s) for one in found]
            )
        return found

    def recover(self, namespace: str, now_s: float) -> None:
        """See to what killed processes were putting.

        What was deleted meanwhile may have come there afterwards, and is then to be deleted once again.
        """
        late = self._database.query(
            "SELECT key FROM shared_puts WHERE namespace = ? AND since_s <= ?",
            (namespace, now_s - PUT_WITHIN_S),
        )
        if late:
            keys = [key for (key,) in late]
            with self._database.transaction():
                self._withdraw_forgotten(namespace, keys)
                self._settled(namespace, keys)

    def _still_listed(self, namespace: str, keys: Sequence[str]) -> list[Publishable]:
        """Those that the catalogue lists; from now on it is known what they are made from."""
        with self._database.transaction():
            rows = self._database.query(
                """SELECT key, tokens, bytes, standing,
                          (SELECT json_group_array(chunk) FROM entry_sources WHERE entry = id) FROM entries
                   WHERE key IN (SELECT value FROM json_each(?)) ORDER BY standing DESC""",
                (json.dumps(keys),),
            )
            found = [
                Publishable(key, tokens, size, at, tuple(json.loads(sources)))
                for key, tokens, size, at, sources in rows
            ]
            self._database.execute_many(
                "INSERT OR IGNORE INTO shared_sources VALUES (?, ?, ?)",
                [(namespace, chunk, entry.key) for entry in found for chunk in entry.sources],
            )
        return found

    def published(self, namespace: str, keys: Sequence[str], kept: Sequence[Publishable]) -> None:
        """All of these keys are dealt with; the tier has `kept`.

        What the others are made from stays known: the tier may hold them from an earlier time. Of `kept` it may have been
        forgotten, since somebody deleted them there while they were put. What the catalogue does not list any more is then
        to be deleted once again, for it is not known which of the two was last.
        """
        with self._database.transaction():  # no REPLACE, whose deletions no trigger counts
            there = [entry.key for entry in kept]
            self._remove_entries(namespace, there)
            self._database.execute_many(
                "INSERT INTO shared_entries VALUES (?, ?, ?, ?, ?)",
                [(entry.key, namespace, entry.tokens, entry.bytes, entry.standing) for entry in kept],
            )
            self._done(namespace, "put", keys)
            self._withdraw_forgotten(namespace, [entry.key for entry in kept if entry.sources])
            self._settled(namespace, keys)

    # What is there

    def remove(self, namespace: str, keys: Iterable[str]) -> None:
        """These were deleted from the tier: what they were made from can be forgotten."""
        gone = list(keys)
        with self._database.transaction():
            self._remove_entries(namespace, gone)
            self._database.execute(
                "DELETE FROM shared_sources WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))",
                (namespace, json.dumps(gone)),
            )

    def known(self, namespace: str) -> frozenset[str]:
        """The keys of all that the tier holds, as far as is known here."""
        rows = self._database.query("SELECT key FROM shared_entries WHERE namespace = ?", (namespace,))
        return frozenset(key for (key,) in rows)

    def reconcile(
        self, namespace: str, known_before: Set[str], sizes: Mapping[str, int], now_s: float
    ) -> int:
        """Put right what is known by a listing of the tier.

        Args:
            namespace: whose entries were listed.
            known_before: what `known` gave before the listing: what was put since then is not taken for gone, nor for new
                what was deleted since.
            sizes: the listing, in bytes by key.
            now_s: the catalogue's time.

        Returns:
            How many rows were wrong.
        """
        with self._database.transaction():
            known = dict(
                self._database.query(
                    "SELECT key, bytes FROM shared_entries WHERE namespace = ?", (namespace,)
                )
            )
            gone = (known.keys() & known_before) - sizes.keys()
            self._remove_entries(namespace, list(gone))
            deleted_since = known_before - known.keys()
            new = [
                (key, size)
                for key, size in sizes.items()
                if known.get(key) != size and key not in deleted_since
            ]
            # A listing does not tell tokens: as many to a byte as there are in what this machine has.
            here = self._totals.of("disk")
            tokens = {key: size * here.tokens // max(1, here.bytes) for key, size in new}
            self._database.execute_many(
                """INSERT INTO shared_entries VALUES (?, ?, ?, ?, ?)
                   ON CONFLICT (key) DO UPDATE SET bytes = excluded.bytes""",
                [
                    (key, namespace, tokens[key], size, standing(1, tokens[key], size, now_s))
                    for key, size in new
                ],
            )
            self._totals.recount(
                "shared",
                "SELECT namespace, COUNT(*), SUM(tokens), SUM(bytes), 0 FROM shared_entries GROUP BY namespace",
            )
        return len(gone) + len(new)

    def total(self, namespace: str) -> Total:
        """How much the tier holds of a namespace, as far as is known here."""
        return self._totals.by_kind("shared").get(namespace, Total())

    def standing(self, key: str) -> float | None:
        """That of an entry which the tier holds, as far as is known here."""
        rows = self._database.query("SELECT standing FROM shared_entries WHERE key = ?", (key,))
        return float(rows[0][0]) if rows else None

    def count_uses(self, uses: Mapping[str, int], now_s: float) -> None:
        """Add retrievals, given by key, whichever tier they were served from."""
        after = raised(self._database, "shared_entries", uses, now_s)
        self._database.execute_many(
            "UPDATE shared_entries SET standing = ? WHERE key = ?", [(at, key) for key, at in after.items()]
        )

    def least_worth(self, namespace: str, total_bytes: int, spare: Collection[str] = ()) -> list[EvictionRow]:
        """The entries of the lowest standing, as many as together make up at least `total_bytes`, without `spare`."""
        source = "shared_entries WHERE namespace = ?"
        return least_worth(self._database, source, (namespace,), total_bytes, spare)

    def _remove_entries(self, namespace: str, keys: Sequence[str]) -> None:
        self._database.execute(
            "DELETE FROM shared_entries WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))",
            (namespace, json.dumps(keys)),
        )

    def _withdraw_forgotten(self, namespace: str, keys: Sequence[str]) -> None:
        """Have those deleted that the tier may hold and that nothing is known of here any more, nor is to be done with."""
        forgotten = self._without_sources(namespace, keys)
        listed = {entry.key for entry in self._still_listed(namespace, forgotten)}
        self._database.execute_many(
            "INSERT OR IGNORE INTO shared_errands VALUES (?, ?, 'delete')",
            [(namespace, key) for key in forgotten if key not in listed],
        )

    def _settled(self, namespace: str, keys: Sequence[str]) -> None:
        """These are not being put any more."""
        self._database.execute(
            "DELETE FROM shared_puts WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))",
            (namespace, json.dumps(keys)),
        )

    def _without_sources(self, namespace: str, keys: Sequence[str]) -> list[str]:
        """Those of these keys of which it is not known what they are made from."""
        rows = self._database.query(
            """SELECT value FROM json_each(?) WHERE NOT EXISTS (
                 SELECT 1 FROM shared_sources WHERE namespace = ? AND key = value)""",
            (json.dumps(keys), namespace),
        )
        return [key for (key,) in rows]

    def _done(self, namespace: str, errand: Errand, keys: Sequence[str]) -> None:
        """Unless the opposite is to be done by now."""
        self._database.execute(
            """DELETE FROM shared_errands WHERE namespace = ? AND errand = ?
               AND key IN (SELECT value FROM json_each(?))""",
            (namespace, errand, json.dumps(keys)),
        )
