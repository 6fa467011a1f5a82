"""The catalogue of entries in SQLite: what is stored, in which file, made how and from which chunks, how often used.

Its rows decide: an entry file without a row does not exist for readers. All SQL about entries is here. Files are deleted
by the caller, after the commit.

Look-ups are counted in memory and written together, every few hundred look-ups. A killed process loses the counts since its
last write. Eviction is then a little less well informed, nothing else.
"""

import json
import logging
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvweave.database import Database
from kvweave.errors import StoreError
from kvweave.kvstore.eviction import (
    EvictionRow,
    eviction_score,
    frequency,
    lowest_scores,
    scores_after_retrievals,
)
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.reports import TIERS, KindTotals, TierName
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.totals import Totals, counting_triggers
from kvweave.types import KVProvenance

_LOG = logging.getLogger(__name__)
FLUSH_AFTER = 512
"""Look-ups between two writes: a write waits for the disk, and a look-up must not."""
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS entries (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, content TEXT NOT NULL,
        kind TEXT NOT NULL, exact INTEGER NOT NULL, context TEXT NOT NULL, rope_regime TEXT NOT NULL,
        token_digest TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
        path TEXT NOT NULL UNIQUE, model TEXT NOT NULL, model_name TEXT NOT NULL, made_at REAL NOT NULL,
        last_used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0, standing REAL NOT NULL)""",
    # Covers the order of eviction, which then does not read the rows themselves.
    "CREATE INDEX IF NOT EXISTS entries_by_standing ON entries (standing, key, bytes)",
    # One chunk has few entries, so this finds its versions. A table that lacks the column is refused here.
    "CREATE INDEX IF NOT EXISTS entries_by_tokens ON entries (token_digest)",
    """CREATE TABLE IF NOT EXISTS entry_sources (
        chunk TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
        PRIMARY KEY (chunk, entry)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS entry_sources_by_entry ON entry_sources (entry)",
    *counting_triggers("entries", "disk", kind="kind", uses="uses"),
    # The latest time this catalogue has seen: for ageing, time never goes back, whatever the clock does.
    "CREATE TABLE IF NOT EXISTS retrieved_chunks (chunk TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS chunk_owners (
        namespace TEXT NOT NULL, chunk TEXT NOT NULL, owner TEXT NOT NULL,
        PRIMARY KEY (namespace, chunk, owner)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS chunk_owners_by_owner ON chunk_owners (namespace, owner)",
    "CREATE TABLE IF NOT EXISTS store_clock (one INTEGER PRIMARY KEY CHECK (one = 1), latest_s REAL NOT NULL)",
)

COUNTERS_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS store_counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
)

_SUM = "SELECT kind, COUNT(*), SUM(tokens), SUM(bytes), SUM(bytes * (uses = 0)) FROM entries GROUP BY kind"


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A row to insert: the entry in file `path`, `bytes` long, made from the chunks `sources`.

    `score` is the eviction score of an entry that comes from another tier, and need not be published there; None for a
    new entry.
    """

    key: EntryKey
    model_name: str
    tokens: int
    bytes: int
    path: str
    sources: Sequence[str]
    score: float | None = None


class Catalog:
    """The tables `entries` and `entry_sources` of `database`, created if missing.

    `shared` records new, retrieved and withdrawn entries in the same transactions. `clock` returns seconds since the epoch.
    """

    def __init__(
        self, database: Database, shared: SharedCatalog | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.database = database
        self._shared = shared or SharedCatalog(database)
        self._clock = clock
        self._totals = Totals(database)
        self.is_new = not database.query("SELECT 1 FROM sqlite_master WHERE name = 'entries'")
        """Whether the tables were missing: entry files that exist all the same belong to a lost catalogue."""
        database.script(_SCHEMA)

    # Looking up

    def paths(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the file of each key that is listed, by one query for all."""
        return self._of_keys("path", keys)

    def versions(
        self, namespace: str, model: str, token_digests: Iterable[str]
    ) -> dict[str, list[KVProvenance]]:
        """Return the provenances of each chunk's KV, by one query for all; see `ChunkStore.versions`."""
        rows = self.database.query(
            """SELECT token_digest, kind, context, exact, rope_regime FROM entries
               WHERE token_digest IN (SELECT value FROM json_each(?))
                 AND namespace = ? AND model = ? AND content = 'kv'
               ORDER BY uses DESC, last_used DESC, key DESC""",
            (json.dumps(list(token_digests)), namespace, model),
        )
        found: dict[str, list[KVProvenance]] = {}
        for tokens, kind, context, exact, rope_regime in rows:
            provenance = KVProvenance(kind, tuple(json.loads(context)), bool(exact), rope_regime)
            found.setdefault(tokens, []).append(provenance)
        return found

    def other_models(self, namespace: str, model: str, token_digests: Iterable[str]) -> list[str]:
        """Return the names of other models that have made KV of these chunks; see `ChunkStore.other_models`."""
        rows = self.database.query(
            """SELECT DISTINCT model_name FROM entries
               WHERE token_digest IN (SELECT value FROM json_each(?))
                 AND namespace = ? AND model <> ? AND content = 'kv' ORDER BY model_name""",
            (json.dumps(list(token_digests)), namespace, model),
        )
        return [name for (name,) in rows]

    def prepared_chunks(self, namespace: str, model: str) -> int:
        """Return how many chunks have prepared KV; see `ChunkStore.prepared_chunks`. Reads every row."""
        rows = self.database.query(
            """SELECT COUNT(DISTINCT token_digest) FROM entries
               WHERE namespace = ? AND model = ? AND content = 'kv' AND kind NOT LIKE 'observed%'
                 AND EXISTS (SELECT 1 FROM entry_sources WHERE entry = id)""",
            (namespace, model),
        )
        return int(rows[0][0])

    def all_paths(self) -> list[str]:
        return [path for (path,) in self.database.query("SELECT path FROM entries")]

    def expected_files(self) -> dict[str, tuple[str, int]]:
        """Return for each listed file the key that it must hold and the size that it is counted with."""
        rows = self.database.query("SELECT path, key, bytes FROM entries ORDER BY path")
        return {path: (key, size) for path, key, size in rows}

    # Inserting and dropping

    def insert(self, entry: NewEntry) -> bool:
        """Add a row and its sources in one transaction; return False if the key is listed already."""
        key, provenance = entry.key, entry.key.provenance
        named = (key.digest, key.namespace, key.model, key.tokens, key.content)
        made = (provenance.kind, provenance.exact, json.dumps(provenance.context), provenance.rope_regime)
        with self.database.transaction():
            now = self._advance_clock()
            score = entry.score
            if score is None:
                score = eviction_score(1, entry.tokens, entry.bytes, now)
            added = self.database.execute(
                """INSERT INTO entries (key, namespace, model, token_digest, content,
                                        kind, exact, context, rope_regime,
                                        tokens, bytes, path, model_name, made_at, last_used, standing)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING""",
                (*named, *made, entry.tokens, entry.bytes, entry.path, entry.model_name, now, now, score),
            )
            if added:
                if entry.score is None:
                    self._shared.queue_puts(key.namespace, [key.digest])
                self.database.execute(
                    """INSERT OR IGNORE INTO entry_sources (chunk, entry)
                       SELECT value, (SELECT id FROM entries WHERE key = ?) FROM json_each(?)""",
                    (key.digest, json.dumps(list(entry.sources))),
                )
        return bool(added)

    def drop(self, keys: Iterable[str]) -> list[str]:
        """Drop rows and return their files. Call it in the transaction that chose the keys."""
        keys = list(keys)
        with self.database.transaction():
            paths = list(self.paths(keys).values())
            self.database.execute(
                "DELETE FROM entries WHERE key IN (SELECT value FROM json_each(?))", (json.dumps(keys),)
            )
        return paths

    def drop_file(self, path: str) -> bool:
        """Drop the row that lists this file; return False if none does any more."""
        return bool(self.database.execute("DELETE FROM entries WHERE path = ?", (path,)))

    def drop_all(self) -> list[str]:
        with self.database.transaction():
            paths = self.all_paths()
            self.database.execute("DELETE FROM entries")
        return paths

    def drop_surplus(self, key: EntryKey, max_versions: int, spare: Collection[str] = ()) -> list[str]:
        """Drop the least used entries of `key`'s chunk and kind beyond `max_versions` and return their files.

        Never drops `key`'s own entry or one of `spare`; others are dropped in their place.
        """
        with self.database.transaction():
            rows = self.database.query(
                """SELECT key FROM entries
                   WHERE token_digest = ? AND namespace = ? AND model = ? AND content = ? AND kind = ? AND key <> ?
                   ORDER BY standing, key""",
                (key.tokens, key.namespace, key.model, key.content, key.provenance.kind, key.digest),
            )
            surplus = max(0, len(rows) + 1 - max_versions)
            return self.drop([other for (other,) in rows if other not in spare][:surplus])

    # Which documents own which chunks; a document is an opaque string here

    def own(self, namespace: str, owner: str, chunks: Iterable[str]) -> None:
        self.database.execute(
            """INSERT OR IGNORE INTO chunk_owners (namespace, chunk, owner)
               SELECT ?, value, ? FROM json_each(?)""",
            (namespace, owner, json.dumps(list(chunks))),
        )

    def all_owned(self, namespace: str, chunks: Iterable[str]) -> bool:
        """Return whether each of these chunks has an owner; True for no chunks."""
        ownerless = self.database.query(
            """SELECT 1 FROM json_each(?) WHERE NOT EXISTS (
                 SELECT 1 FROM chunk_owners WHERE namespace = ? AND chunk = value) LIMIT 1""",
            (json.dumps(list(chunks)), namespace),
        )
        return not ownerless

    def disown(self, namespace: str, owner: str) -> list[str]:
        """Forget an owner and drop every entry made from a chunk that has none left, in one transaction.

        Chunks that never had an owner, those of callers without documents, do not count. Queues the deletion of the entries'
        copies in the shared tier.

        Returns:
            The files of the dropped entries, to be deleted after the commit; none for an unknown owner.
        """
        with self.database.transaction():
            ownerless = self.database.query(
                """SELECT chunk FROM chunk_owners AS mine WHERE namespace = ? AND owner = ? AND NOT EXISTS (
                     SELECT 1 FROM chunk_owners AS other
                     WHERE other.namespace = mine.namespace AND other.chunk = mine.chunk
                       AND other.owner <> mine.owner)""",
                (namespace, owner),
            )
            self.database.execute(
                "DELETE FROM chunk_owners WHERE namespace = ? AND owner = ?", (namespace, owner)
            )
            chunks = [chunk for (chunk,) in ownerless]
            rows = self.database.query(
                """SELECT DISTINCT key FROM entries JOIN entry_sources ON entry = id
                   WHERE namespace = ? AND chunk IN (SELECT value FROM json_each(?))""",
                (namespace, json.dumps(chunks)),
            )
            self._shared.queue_deletions(namespace, chunks)
            self.database.execute(
                "DELETE FROM retrieved_chunks WHERE chunk IN (SELECT value FROM json_each(?))",
                (json.dumps(chunks),),
            )
            return self.drop(key for (key,) in rows)

    # Usage and eviction

    def count_uses(self, uses: Mapping[str, int]) -> None:
        """Add retrievals at this moment, given by key."""
        with self.database.transaction():
            now = self._advance_clock()
            scores = scores_after_retrievals(self.database, "entries", uses, now)
            self.database.execute_many(
                "UPDATE entries SET uses = uses + ?, last_used = ?, standing = ? WHERE key = ?",
                [(uses[key], now, score, key) for key, score in scores.items()],
            )
            self._shared.count_uses(uses, now)

    def count_retrieved(self, chunks: Mapping[tuple[str, str], int]) -> None:
        """Add look-ups of documents' chunks for prompts, found or not, given by namespace and token digest."""
        self.database.execute_many(
            """INSERT INTO retrieved_chunks (chunk, times)
               SELECT ?2, ?3 WHERE EXISTS (SELECT 1 FROM chunk_owners WHERE namespace = ?1 AND chunk = ?2)
               ON CONFLICT (chunk) DO UPDATE SET times = times + excluded.times""",
            [(*chunk, times) for chunk, times in chunks.items()],
        )

    def retrieved(self) -> dict[str, int]:
        """Return how often each chunk was looked up for a prompt, by its token digest."""
        return dict(self.database.query("SELECT chunk, times FROM retrieved_chunks"))

    def scores(self, keys: Iterable[str]) -> dict[str, float]:
        return self._of_keys("standing", keys)

    def lowest_scores(self, total_bytes: int, spare: Collection[str] = ()) -> list[EvictionRow]:
        """Return the entries with the lowest scores that together take at least `total_bytes`, without `spare`."""
        return lowest_scores(self.database, "entries", (), total_bytes, spare)

    def now_s(self) -> float:
        """Return seconds since the epoch, never less than any time the catalogue has seen."""
        seen = self.database.query("SELECT latest_s FROM store_clock")
        return max(self._clock(), seen[0][0]) if seen else self._clock()

    def _of_keys(self, column: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return a column of each key that is listed."""
        rows = self.database.query(
            f"SELECT key, {column} FROM entries WHERE key IN (SELECT value FROM json_each(?))",
            (json.dumps(list(keys)),),
        )
        return dict(rows)

    def _advance_clock(self) -> float:
        now = self.now_s()
        self.database.execute(
            "INSERT INTO store_clock VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET latest_s = excluded.latest_s",
            (now,),
        )
        return now

    # Sizes

    def total_bytes(self) -> int:
        """Return the size of all listed files, from a counter."""
        return self._totals.of_tier("disk").bytes

    def unused_bytes(self) -> int:
        """Return the size of all listed files that no look-up has ever found, from a counter."""
        return self._totals.of_tier("disk").unused_bytes

    def totals(self) -> dict[str, KindTotals]:
        """Return how much is stored of each kind, and how often it is retrieved; reads every row."""
        now = self.now_s()
        frequencies: defaultdict[str, float] = defaultdict(float)
        for kind, score, tokens, size in self.database.query(
            "SELECT kind, standing, tokens, bytes FROM entries"
        ):
            frequencies[kind] += frequency(score, tokens, size, now)
        kinds = self._totals.by_kind("disk")
        return {
            kind: KindTotals(total.entries, total.tokens, total.bytes, frequencies[kind])
            for kind, total in sorted(kinds.items())
        }

    def correct_sizes(self, sizes: Mapping[str, int]) -> None:
        """Set the sizes of these files; the totals are wrong until `recount`."""
        self.database.execute_many(
            "UPDATE entries SET bytes = ? WHERE path = ?", [(size, path) for path, size in sizes.items()]
        )

    def recount(self) -> bool:
        """Correct the counters by the rows; return whether they were right."""
        return self._totals.recount("disk", _SUM)


_NAMES = ("hits", "misses", "damaged", "evicted", *(f"hits_{tier}" for tier in TIERS))


class UsageCounters:
    """Retrievals per entry, and the counters in the table `store_counters`. Safe to use from several threads."""

    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database = database
        self._catalog = catalog
        self._uses: Counter[str] = Counter()
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()
        database.script(COUNTERS_SCHEMA)

    @property
    def needs_flush(self) -> bool:
        """Whether enough has gathered to be worth a write."""
        return self._counts["hits"] + self._counts["misses"] >= FLUSH_AFTER

    def record_hits(self, found: Iterable[tuple[str, TierName]]) -> None:
        """Count entries that were found, given by key and the tier that served them."""
        with self._guard:
            for key, tier in found:
                self._uses[key] += 1
                self._counts["hits"] += 1
                self._counts[f"hits_{tier}"] += 1

    def record_retrieved(self, chunks: Iterable[tuple[str, str]]) -> None:
        """Count spans of prompts whose KV was looked up, found or not, given by namespace and token digest."""
        with self._guard:
            self._chunks.update(chunks)

    def add(self, name: str, count: int = 1) -> None:
        """Raise a counter: misses, damaged, evicted."""
        assert name in _NAMES
        with self._guard:
            self._counts[name] += count

    def try_flush(self) -> None:
        """Write what has gathered, in one transaction. If the database refuses, keep it: a look-up must not fail because of it.

        Does nothing inside a transaction: a rollback would lose the counts, and a full disk would end the transaction.
        """
        if self._database.in_transaction:
            return
        with self._guard:
            uses, chunks, counts = self._uses, self._chunks, self._counts
            self._uses, self._chunks, self._counts = Counter(), Counter(), Counter()
        if not uses and not chunks and not counts:
            return
        try:
            with self._database.transaction():
                self._catalog.count_uses(uses)
                self._database.execute_many(
                    """INSERT INTO store_counters (name, value) VALUES (?, ?)
                       ON CONFLICT (name) DO UPDATE SET value = value + excluded.value""",
                    list(counts.items()),
                )
                self._catalog.count_retrieved(chunks)
        except BaseException as error:
            with self._guard:
                self._uses.update(uses)
                self._chunks.update(chunks)
                self._counts.update(counts)
            if not isinstance(error, StoreError | sqlite3.Error):
                raise
            _LOG.debug("usage counters not written yet: %s", error)

    def totals(self) -> dict[str, int]:
        """Return all counters since the store was created, of what has been written."""
        return dict.fromkeys(_NAMES, 0) | dict(self._database.query("SELECT name, value FROM store_counters"))
