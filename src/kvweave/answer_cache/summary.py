"""The summary of the documents that questions are predicted from, in parts.

It is part of the knowledge base's own database, so the commit that removes a document also deletes the parts that came from it.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.database import Database


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A listed chunk: its name in the index, the version of its document, its length."""

    name: str
    version: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SummaryPart:
    """Key content of some chunks, the versions of their documents, and the rounds of predictions made from it."""

    id: int
    text: str
    versions: frozenset[str]
    rounds: int


class CorpusSummary:
    """The tables `abstract_parts` and `abstract_chunks` of `database`, created if missing."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS abstract_parts (
            id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL, rounds INTEGER NOT NULL DEFAULT 0,
            made_at REAL NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS abstract_chunks (
            chunk TEXT PRIMARY KEY, version TEXT NOT NULL,
            part INTEGER NOT NULL REFERENCES abstract_parts (id) ON DELETE CASCADE) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS abstract_chunks_by_version ON abstract_chunks (version)",
        "CREATE INDEX IF NOT EXISTS abstract_chunks_by_part ON abstract_chunks (part)",
        "CREATE TABLE IF NOT EXISTS abstract_drops (reason TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def missing(self, chunks: Iterable[ChunkRef]) -> list[ChunkRef]:
        """Return the chunks that no part covers."""
        covered = {name for (name,) in self._database.query("SELECT chunk FROM abstract_chunks")}
        return [chunk for chunk in chunks if chunk.name not in covered]

    def put(self, chunks: Sequence[ChunkRef], text: str) -> None:
        """Store the key content of a batch. An empty text marks a batch without any, so that it is not summarised again.

        Call it in the transaction that has checked that the chunks are still listed.
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

    def record_drop(self, reason: str) -> None:
        """Count a summary that was dropped."""
        self._database.execute(
            """INSERT INTO abstract_drops VALUES (?, 1)
               ON CONFLICT (reason) DO UPDATE SET number = number + 1""",
            (reason,),
        )

    def drops(self) -> dict[str, int]:
        """Return the number of dropped summaries by reason."""
        rows = self._database.query("SELECT reason, number FROM abstract_drops ORDER BY reason")
        return {reason: int(number) for reason, number in rows}

    def parts(self) -> list[SummaryPart]:
        """Return all parts with content, oldest first."""
        versions: dict[int, set[str]] = {}
        for part, version in self._database.query("SELECT part, version FROM abstract_chunks"):
            versions.setdefault(part, set()).add(version)
        rows = self._database.query(
            "SELECT id, text, rounds FROM abstract_parts WHERE text <> '' ORDER BY id"
        )
        return [
            SummaryPart(id_, text, frozenset(versions.get(id_, ())), rounds) for id_, text, rounds in rows
        ]

    def record_round(self, part: int) -> bool:
        """Count one round of predictions from a part; return False if the part is gone."""
        changed = self._database.execute(
            "UPDATE abstract_parts SET rounds = rounds + 1 WHERE id = ?", (part,)
        )
        return changed > 0

    def delete(self, versions: Iterable[str]) -> None:
        """Delete every part that covers a chunk of these versions."""
        self._database.execute(
            """DELETE FROM abstract_parts WHERE id IN
                 (SELECT part FROM abstract_chunks WHERE version IN (SELECT value FROM json_each(?)))""",
            (json.dumps(list(versions)),),
        )
