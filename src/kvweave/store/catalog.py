"""The catalogue of entries in SQLite: what is stored, in which file, how and from which chunks, how often used.

Its rows are the truth: a file that none of them lists does not exist. All statements about entries are
here; files are deleted by the caller, after the commit.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvweave.core import Making
from kvweave.store.database import Database
from kvweave.store.eviction import EvictionRow
from kvweave.store.keys import EntryKey
from kvweave.store.reports import KindTotals

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS entries (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, content TEXT NOT NULL,
        kind TEXT NOT NULL, exact INTEGER NOT NULL, context TEXT NOT NULL, rope_regime TEXT NOT NULL,
        token_digest TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
        path TEXT NOT NULL UNIQUE, model TEXT NOT NULL, model_name TEXT NOT NULL, made_at REAL NOT NULL,
        last_used REAL NOT NULL, uses INTEGER NOT NULL DEFAULT 0)""",
    # Covers the order of eviction and the total size, so that neither reads the rows themselves.
    "CREATE INDEX IF NOT EXISTS entries_by_use ON entries (uses, last_used, key, bytes)",
    # One chunk has few entries, so this finds its versions. A table from before it had the column is refused here.
    "CREATE INDEX IF NOT EXISTS entries_by_tokens ON entries (token_digest)",
    """CREATE TABLE IF NOT EXISTS entry_sources (
        chunk TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES entries (id) ON DELETE CASCADE,
        PRIMARY KEY (chunk, entry)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS entry_sources_by_entry ON entry_sources (entry)",
)
_PAGE_ROWS = 256


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A row to insert: the entry in file `path`, `bytes` long, made from the chunks `sources`."""

    key: EntryKey
    model_name: str
    tokens: int
    bytes: int
    path: str
    sources: Sequence[str]


class Catalog:
    """The tables `entries` and `entry_sources` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def insert(self, entry: NewEntry) -> bool:
        """Add a row and its sources in one transaction; False if the key is there already."""
        key, made, now = entry.key, entry.key.making, time.time()
        named = (key.digest, key.namespace, key.model, key.tokens, key.content)
        how = (made.kind, made.exact, json.dumps(made.context), made.rope_regime)
        with self._database.transaction():
            added = self._database.execute(
                """INSERT INTO entries (key, namespace, model, token_digest, content,
                                        kind, exact, context, rope_regime,
                                        tokens, bytes, path, model_name, made_at, last_used)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING""",
                (*named, *how, entry.tokens, entry.bytes, entry.path, entry.model_name, now, now),
            )
            if added:
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

    def versions(self, namespace: str, model: str, token_digests: Iterable[str]) -> dict[str, list[Making]]:
        """How each chunk's stored KV was made, by one query whatever their number; see `ChunkStore.versions`."""
        rows = self._database.query(
            """SELECT token_digest, kind, context, exact, rope_regime FROM entries
               WHERE token_digest IN (SELECT value FROM json_each(?))
                 AND namespace = ? AND model = ? AND content = 'kv'
               ORDER BY uses DESC, last_used DESC, key DESC""",
            (json.dumps(list(token_digests)), namespace, model),
        )
        found: dict[str, list[Making]] = {}
        for tokens, kind, context, exact, rope_regime in rows:
            making = Making(kind, tuple(json.loads(context)), bool(exact), rope_regime)
            found.setdefault(tokens, []).append(making)
        return found

    def drop_surplus(self, key: EntryKey, most: int) -> list[str]:
        """Drop the least used entries of `key`'s chunk and kind beyond `most`, never `key`'s own; returns their files."""
        with self._database.transaction():
            rows = self._database.query(
                """SELECT key FROM entries
                   WHERE token_digest = ? AND namespace = ? AND model = ? AND content = ? AND kind = ? AND key <> ?
                   ORDER BY uses DESC, last_used DESC, key DESC LIMIT -1 OFFSET ?""",
                (key.tokens, key.namespace, key.model, key.content, key.making.kind, key.digest, most - 1),
            )
            return self.drop(surplus for (surplus,) in rows)

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
        """Drop every row of the namespace that has one of these chunks among its sources; returns their files."""
        with self._database.transaction():
            rows = self._database.query(
                """SELECT DISTINCT key FROM entries JOIN entry_sources ON entry = id
                   WHERE namespace = ? AND chunk IN (SELECT value FROM json_each(?))""",
                (namespace, json.dumps(list(chunks))),
            )
            return self.drop(key for (key,) in rows)

    def drop_all(self) -> list[str]:
        """Drop every row; returns their files."""
        with self._database.transaction():
            paths = self.listed()
            self._database.execute("DELETE FROM entries")
        return paths

    def count_uses(self, uses: Mapping[str, int], when: float) -> None:
        """Add retrievals, given by key, and set the time of the last one (seconds since the epoch)."""
        self._database.execute_many(
            "UPDATE entries SET uses = uses + ?, last_used = ? WHERE key = ?",
            [(count, when, key) for key, count in uses.items()],
        )

    def total_bytes(self) -> int:
        """The size of all listed files; reads one index."""
        return int(self._database.query("SELECT COALESCE(SUM(bytes), 0) FROM entries")[0][0])

    def unasked_bytes(self) -> int:
        """The size of all listed files that no look-up has ever found."""
        return int(self._database.query("SELECT COALESCE(SUM(bytes), 0) FROM entries WHERE uses = 0")[0][0])

    def least_used(self, total_bytes: int, spare: str = "") -> list[EvictionRow]:
        """The least used entries, as many as together make up at least `total_bytes`, without the key `spare`."""
        limit = _PAGE_ROWS
        while True:
            rows = self._database.query(
                """SELECT key, bytes, uses, last_used FROM entries WHERE key <> ?
                   ORDER BY uses, last_used, key LIMIT ?""",
                (spare, limit),
            )
            if len(rows) < limit or sum(row[1] for row in rows) >= total_bytes:
                return [EvictionRow(*row) for row in rows]
            limit *= 4

    def totals(self) -> dict[str, KindTotals]:
        """How much is stored of each kind."""
        rows = self._database.query(
            "SELECT kind, COUNT(*), SUM(tokens), SUM(bytes) FROM entries GROUP BY kind ORDER BY kind"
        )
        return {kind: KindTotals(entries, tokens, size) for kind, entries, tokens, size in rows}

    def listed(self) -> list[str]:
        """All files that count."""
        return [path for (path,) in self._database.query("SELECT path FROM entries")]

    def keys_by_file(self) -> dict[str, str]:
        """The key that each listed file must hold."""
        return dict(self._database.query("SELECT path, key FROM entries ORDER BY path"))
