"""The catalogue of entries in SQLite: what is stored, in which file, how and from which chunks, how often used.

Its rows are the truth: a file that none of them lists does not exist. All statements about entries are
here; files are deleted by the caller, after the commit.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvweave.database import Database
from kvweave.kvstore.eviction import EvictionRow, heat, least_worth, raised, standing
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.reports import KindTotals
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.totals import Totals, counted
from kvweave.types import KVProvenance

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS entries (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, content TEXT NOT NULL,
        kind TEXT NOT NULL, exact INTEGER NOT NULL, context TEXT NOT NULL, rope_regime TEXT NOT NULL,
        token_digest TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
        path TEXT NOT NULL UNIQUE, model TEXT NOT NULL, model_name TEXT NOT NULL, made_at REAL NOT NULL,
        last_used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0, standing REAL NOT NULL)""",
    # Covers the order of eviction, so that it does not read the rows themselves.
    "CREATE INDEX IF NOT EXISTS entries_by_standing ON entries (standing, key, bytes)",
    # One chunk has few entries, so this finds its versions. A table from before it had the column is refused here.
    "CREATE INDEX IF NOT EXISTS entries_by_tokens ON entries (token_digest)",
    """CREATE TABLE IF NOT EXISTS entry_sources (
        chunk TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
        PRIMARY KEY (chunk, entry)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS entry_sources_by_entry ON entry_sources (entry)",
    *counted("entries", "disk", kind="kind", uses="uses"),
    # The latest time this catalogue has seen: for ageing, time never goes back, whatever the clock does.
    "CREATE TABLE IF NOT EXISTS store_clock (one INTEGER PRIMARY KEY CHECK (one = 1), latest_s REAL NOT NULL)",
)
_SUM = "SELECT kind, COUNT(*), SUM(tokens), SUM(bytes), SUM(bytes * (uses = 0)) FROM entries GROUP BY kind"


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A row to insert: the entry in file `path`, `bytes` long, made from the chunks `sources`.

    `standing` is what an entry has that comes from another tier, to which it need not be published then; None for a new one.
    """

    key: EntryKey
    model_name: str
    tokens: int
    bytes: int
    path: str
    sources: Sequence[str]
    standing: float | None = None


class Catalog:
    """The tables `entries` and `entry_sources` of `database`, made if they are not there.

    `shared` is told what is new, asked for and withdrawn, in the same transactions. `clock` gives seconds since the epoch.
    """

    def __init__(
        self, database: Database, shared: SharedCatalog | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._shared = shared or SharedCatalog(database)
        self._clock = clock
        self._totals = Totals(database)
        self.is_new = not database.query("SELECT 1 FROM sqlite_master WHERE name = 'entries'")
        """Whether there was none before: files that are there all the same were listed by one that is lost."""
        database.script(_SCHEMA)

    def insert(self, entry: NewEntry) -> bool:
        """Add a row and its sources in one transaction; False if the key is there already."""
        key, made = entry.key, entry.key.provenance
        named = (key.digest, key.namespace, key.model, key.tokens, key.content)
        how = (made.kind, made.exact, json.dumps(made.context), made.rope_regime)
        with self._database.transaction():
            now = self._advance_clock()
            at = entry.standing
            if at is None:
                at = standing(1, entry.tokens, entry.bytes, now)
            added = self._database.execute(
                """INSERT INTO entries (key, namespace, model, token_digest, content,
                                        kind, exact, context, rope_regime,
                                        tokens, bytes, path, model_name, made_at, last_used, standing)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING""",
                (*named, *how, entry.tokens, entry.bytes, entry.path, entry.model_name, now, now, at),
            )
            if added:
                if entry.standing is None:
                    self._shared.publish(key.namespace, [key.digest])
                self._database.execute(
                    """INSERT OR IGNORE INTO entry_sources (chunk, entry)
                       SELECT value, (SELECT id FROM entries WHERE key = ?) FROM json_each(?)""",
                    (key.digest, json.dumps(list(entry.sources))),
                )
        return bool(added)

    def paths(self, keys: Iterable[str]) -> dict[str, str]:
        """The file of each key that is stored, by one query whatever their number."""
        rows = self._database.query(
            "SELECT key, path FROM entries WHERE key IN (SELECT value FROM json_each(?))",
            (json.dumps(list(keys)),),
        )
        return dict(rows)

    def versions(
        self, namespace: str, model: str, token_digests: Iterable[str]
    ) -> dict[str, list[KVProvenance]]:
        """How each chunk's stored KV was made, by one query whatever their number; see `ChunkStore.versions`."""
        rows = self._database.query(
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

    def drop_surplus(self, key: EntryKey, most: int, spare: Collection[str] = ()) -> list[str]:
        """Drop the least used entries of `key`'s chunk and kind beyond `most`; returns their files.

        Never `key`'s own, and none of `spare`, in whose place those that come next are dropped.
        """
        with self._database.transaction():
            rows = self._database.query(
                """SELECT key FROM entries
                   WHERE token_digest = ? AND namespace = ? AND model = ? AND content = ? AND kind = ? AND key <> ?
                   ORDER BY standing, key""",
                (key.tokens, key.namespace, key.model, key.content, key.provenance.kind, key.digest),
            )
            surplus = max(0, len(rows) + 1 - most)
            return self.drop([other for (other,) in rows if other not in spare][:surplus])

    def drop_file(self, path: str) -> bool:
        """Drop the row that lists this file; False if none does any more."""
        return bool(self._database.execute("DELETE FROM entries WHERE path = ?", (path,)))

    def drop(self, keys: Iterable[str]) -> list[str]:
        """Drop rows; returns their files. For use inside a transaction with what chose the keys."""
        keys = list(keys)
        with self._database.transaction():
            paths = list(self.paths(keys).values())
            self._database.execute(
                "DELETE FROM entries WHERE key IN (SELECT value FROM json_each(?))", (json.dumps(keys),)
            )
        return paths

    def drop_made_from(self, namespace: str, chunks: Iterable[str]) -> list[str]:
        """Drop every row of the namespace that has one of these chunks among its sources; returns their files.

        What of it is in the shared tier is to be deleted there.
        """
        made_from = json.dumps(list(chunks))
        with self._database.transaction():
            rows = self._database.query(
                """SELECT DISTINCT key FROM entries JOIN entry_sources ON entry = id
                   WHERE namespace = ? AND chunk IN (SELECT value FROM json_each(?))""",
                (namespace, made_from),
            )
            self._shared.withdraw_made_from(namespace, made_from)
            return self.drop(key for (key,) in rows)

    def drop_all(self) -> list[str]:
        """Drop every row; returns their files."""
        with self._database.transaction():
            paths = self.listed()
            self._database.execute("DELETE FROM entries")
        return paths

    def count_uses(self, uses: Mapping[str, int]) -> None:
        """Add retrievals, given by key, as of now."""
        with self._database.transaction():
            now = self._advance_clock()
            after = raised(self._database, "entries", uses, now)
            self._database.execute_many(
                "UPDATE entries SET uses = uses + ?, last_used = ?, standing = ? WHERE key = ?",
                [(uses[key], now, at, key) for key, at in after.items()],
            )
            self._shared.count_uses(uses, now)

    def now_s(self) -> float:
        """Seconds since the epoch, never less than any time the catalogue has seen."""
        seen = self._database.query("SELECT latest_s FROM store_clock")
        return max(self._clock(), seen[0][0]) if seen else self._clock()

    def total_bytes(self) -> int:
        """The size of all listed files; reads a counter."""
        return self._totals.of("disk").bytes

    def unasked_bytes(self) -> int:
        """The size of all listed files that no look-up has ever found; reads a counter."""
        return self._totals.of("disk").unasked_bytes

    def least_worth(self, total_bytes: int, spare: Collection[str] = ()) -> list[EvictionRow]:
        """The entries of the lowest standing, as many as together make up at least `total_bytes`, without `spare`."""
        return least_worth(self._database, "entries", (), total_bytes, spare)

    def standings(self, keys: Iterable[str]) -> dict[str, float]:
        """The standing of each key that is listed, by one query whatever their number."""
        rows = self._database.query(
            "SELECT key, standing FROM entries WHERE key IN (SELECT value FROM json_each(?))",
            (json.dumps(list(keys)),),
        )
        return dict(rows)

    def totals(self) -> dict[str, KindTotals]:
        """How much is stored of each kind, and how hot it is; reads every row."""
        now = self.now_s()
        heats: defaultdict[str, float] = defaultdict(float)
        for kind, at, tokens, size in self._database.query(
            "SELECT kind, standing, tokens, bytes FROM entries"
        ):
            heats[kind] += heat(at, tokens, size, now)
        kinds = self._totals.by_kind("disk")
        return {
            kind: KindTotals(of.entries, of.tokens, of.bytes, heats[kind])
            for kind, of in sorted(kinds.items())
        }

    def recount(self) -> bool:
        """Compare the counters with the rows and put them right; whether they were."""
        return self._totals.recount("disk", _SUM)

    def sizes(self, keys: Iterable[str] | None = None) -> dict[str, int]:
        """The size of each entry's file: of these keys, or of all."""
        if keys is None:
            return dict(self._database.query("SELECT key, bytes FROM entries"))
        rows = self._database.query(
            "SELECT key, bytes FROM entries WHERE key IN (SELECT value FROM json_each(?))",
            (json.dumps(list(keys)),),
        )
        return dict(rows)

    def listed(self) -> list[str]:
        """All files that count."""
        return [path for (path,) in self._database.query("SELECT path FROM entries")]

    def stated_by_file(self) -> dict[str, tuple[str, int]]:
        """The key that each listed file must hold, and the size that it is counted with."""
        rows = self._database.query("SELECT path, key, bytes FROM entries ORDER BY path")
        return {path: (key, size) for path, key, size in rows}

    def correct_sizes(self, sizes: Mapping[str, int]) -> None:
        """Count these files with the sizes given; the totals are wrong until `recount`."""
        self._database.execute_many(
            "UPDATE entries SET bytes = ? WHERE path = ?", [(size, path) for path, size in sizes.items()]
        )

    def _advance_clock(self) -> float:
        now = self.now_s()
        self._database.execute(
            "INSERT INTO store_clock VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET latest_s = excluded.latest_s",
            (now,),
        )
        return now
