"""The abstract: the key content of all chunks in parts, each made from one batch of them (PerCache §4.1.2).

A part goes with any document that it was made from, in the commit that changes it; what else went into it is summed up
again. Never calls a model.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.store.database import Database

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS abstract_parts (
        id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL, rounds INTEGER NOT NULL DEFAULT 0,
        made_at REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS abstract_chunks (
        chunk TEXT PRIMARY KEY, version TEXT NOT NULL,
        part INTEGER NOT NULL REFERENCES abstract_parts (id) ON DELETE CASCADE) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS abstract_chunks_by_version ON abstract_chunks (version)",
    "CREATE INDEX IF NOT EXISTS abstract_chunks_by_part ON abstract_chunks (part)",
)


@dataclass(frozen=True, slots=True)
class ChunkName:
    """A listed chunk: its name in the index, the version of its document, and its tokens."""

    name: str
    version: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """Key content of some chunks, the versions of their documents, and how often questions were predicted from it."""

    id: int
    text: str
    versions: frozenset[str]
    rounds: int


class Abstract:
    """The tables `abstract_parts` and `abstract_chunks` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def lacking(self, chunks: Iterable[ChunkName]) -> list[ChunkName]:
        """Those of some chunks that no part was made from."""
        covered = {name for (name,) in self._database.query("SELECT chunk FROM abstract_chunks")}
        return [chunk for chunk in chunks if chunk.name not in covered]

    def put(self, chunks: Sequence[ChunkName], text: str) -> None:
        """Write down the key content of a batch; nothing where it has none, so that it is not asked for again.

        Call it in the transaction that has seen that the chunks are still listed.
        """
        with self._database.transaction():
            self._database.execute(
                "INSERT INTO abstract_parts (text, made_at) VALUES (?, ?)", (text, time.time())
            )
            ((part,),) = self._database.query("SELECT max(id) FROM abstract_parts")
            self._database.execute_many(
                "INSERT OR REPLACE INTO abstract_chunks VALUES (?, ?, ?)",
                [(chunk.name, chunk.version, part) for chunk in chunks],
            )

    def parts(self) -> list[Part]:
        """All parts that say something, the oldest first."""
        versions: dict[int, set[str]] = {}
        for part, version in self._database.query("SELECT part, version FROM abstract_chunks"):
            versions.setdefault(part, set()).add(version)
        rows = self._database.query(
            "SELECT id, text, rounds FROM abstract_parts WHERE text <> '' ORDER BY id"
        )
        return [Part(id_, text, frozenset(versions.get(id_, ())), rounds) for id_, text, rounds in rows]

    def used(self, part: int) -> bool:
        """Count one round of predictions from a part; False if it is gone."""
        changed = self._database.execute(
            "UPDATE abstract_parts SET rounds = rounds + 1 WHERE id = ?", (part,)
        )
        return changed > 0

    def forget(self, versions: Iterable[str]) -> None:
        """Drop every part that something of these versions went into."""
        self._database.execute(
            """DELETE FROM abstract_parts WHERE id IN
                 (SELECT part FROM abstract_chunks WHERE version IN (SELECT value FROM json_each(?)))""",
            (json.dumps(list(versions)),),
        )

    def clear(self) -> None:
        """Drop everything."""
        self._database.execute("DELETE FROM abstract_parts")
