"""The list of documents and their chunks in SQLite: what it does not list does not exist for readers.

Every write joins the caller's transaction, so that a document becomes visible in the same commit as the
ownership of its chunk KV. Knows neither texts nor vectors; the bank has those under the same row names.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvweave.database import Database
from kvweave.types import Chunk, Document

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS documents (
        source TEXT PRIMARY KEY, version TEXT NOT NULL, digest TEXT NOT NULL, title TEXT NOT NULL,
        chunks INTEGER NOT NULL, tokens INTEGER NOT NULL, added_at REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS document_chunks (
        row_id TEXT PRIMARY KEY, source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
        position INTEGER NOT NULL, kv_digest TEXT NOT NULL, kv_tokens INTEGER NOT NULL,
        UNIQUE (source, position)) WITHOUT ROWID""",
)
Chunks: TypeAlias = "list[ListedChunk]"  # inside Shelf, `list` is the method
Sources: TypeAlias = list[str]

_DOCUMENT = "SELECT source, version, digest, title, chunks, tokens, added_at FROM documents"
_CHUNK = "SELECT row_id, source, position, kv_digest, kv_tokens FROM document_chunks"


@dataclass(frozen=True, slots=True)
class ListedDocument:
    """A document as the knowledge base lists it.

    `version` names its rows in the bank, `digest` its file's bytes; `chunks` and `tokens` are counts;
    `added_at_s` is seconds since the epoch.
    """

    source: str
    version: str
    digest: str
    title: str
    chunks: int
    tokens: int
    added_at_s: float


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """A chunk's place: `row_id` in the bank, `position` (from 0) in its document.

    `kv_digest` is what its KV goes by: the digest of its `kv_tokens` token ids as they stand in a prompt.
    """

    row_id: str
    source: str
    position: int
    kv_digest: str
    kv_tokens: int


class DocumentTable:
    """The tables `documents` and `document_chunks` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def get(self, source: str) -> ListedDocument | None:
        """The document from this source, or None."""
        rows = self._database.query(f"{_DOCUMENT} WHERE source = ?", (source,))
        return ListedDocument(*rows[0]) if rows else None

    def list(self) -> list[ListedDocument]:
        """All documents, ordered by source."""
        return [ListedDocument(*row) for row in self._database.query(f"{_DOCUMENT} ORDER BY source")]

    def put(
        self,
        document: Document,
        chunks: Sequence[Chunk],
        kv_digests: Sequence[str],
        kv_tokens: Sequence[int],
    ) -> ListedDocument:
        """List a document with its chunks, in place of any earlier version from the same source.

        Args:
            document: what it was cut from.
            chunks: n chunks in reading order.
            kv_digests: for each the token digest that its KV goes by, of its ids as they stand in a prompt.
            kv_tokens: for each how many ids those are, what separates it from the next chunk included.
        """
        version = document_id(document.source, document.digest)
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        listed = ListedDocument(
            document.source, version, document.digest, document.title, len(chunks), tokens, time.time()
        )
        rows = [
            (row_id(version, n), document.source, n, digest, count)
            for n, (_, digest, count) in enumerate(zip(chunks, kv_digests, kv_tokens, strict=True))
        ]
        with self._database.transaction():
            self.remove(document.source)
            self._database.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    document.source,
                    version,
                    document.digest,
                    document.title,
                    len(chunks),
                    tokens,
                    listed.added_at_s,
                ),
            )
            self._database.execute_many("INSERT INTO document_chunks VALUES (?, ?, ?, ?, ?)", rows)
        return listed

    def remove(self, source: str) -> ListedDocument | None:
        """Take a document and its chunks off the list; returns what it was, None if it was not listed."""
        with self._database.transaction():
            listed = self.get(source)
            self._database.execute("DELETE FROM documents WHERE source = ?", (source,))
        return listed

    def visible(self) -> frozenset[str]:
        """The versions whose rows in the bank count: one per listed document."""
        return frozenset(version for (version,) in self._database.query("SELECT version FROM documents"))

    def all_chunks(self) -> Chunks:
        """Every listed chunk, by source and position."""
        return [ListedChunk(*row) for row in self._database.query(f"{_CHUNK} ORDER BY source, position")]

    def chunks_at(self, places: Sequence[tuple[str, int]]) -> Chunks:
        """The listed chunks at these places, given by source and position, in no order; by one query."""
        rows = self._database.query(
            f"""{_CHUNK} WHERE (source, position) IN
                (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))""",
            (json.dumps(places),),
        )
        return [ListedChunk(*row) for row in rows]

    def sources_under(self, path: str | Path) -> Sources:
        """Sources that are `path` itself or lie in that folder, ordered. The path need not exist any more."""
        place = os.path.abspath(Path(path).expanduser())
        folder = place.rstrip(os.sep) + os.sep
        rows = self._database.query(
            "SELECT source FROM documents WHERE source = ? OR substr(source, 1, ?) = ? ORDER BY source",
            (place, len(folder), folder),
        )
        return [source for (source,) in rows]


def document_id(source: str, digest: str) -> str:
    """Name one version of a document, by its source and the digest of its bytes: 32 hex digits."""
    return hashlib.blake2b(json.dumps([source, digest]).encode(), digest_size=16).hexdigest()


def row_id(version: str, position: int) -> str:
    """Name the chunk at a position (from 0) of a document's version; unique in a knowledge base."""
    return f"{version}:{position}"
