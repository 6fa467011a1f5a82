"""The list of documents and their chunks, in SQLite. A document or chunk that is not listed does not exist for readers.

Every write joins the caller's transaction, so a document becomes visible in the commit that also records who owns its chunk KV.
Texts and vectors are in the vector index, under the same row ids. This list knows which chunks have no vector yet.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvweave.database import Database
from kvweave.types import Chunk, Document, Place

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS documents (
        source TEXT PRIMARY KEY, version TEXT NOT NULL, digest TEXT NOT NULL, title TEXT NOT NULL,
        chunks INTEGER NOT NULL, tokens INTEGER NOT NULL, added_at REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS document_chunks (
        row_id TEXT PRIMARY KEY, source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
        position INTEGER NOT NULL, kv_digest TEXT NOT NULL, kv_tokens INTEGER NOT NULL,
        UNIQUE (source, position)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS document_notes (
        source TEXT NOT NULL REFERENCES documents (source) ON DELETE CASCADE,
        position INTEGER NOT NULL, note TEXT NOT NULL, PRIMARY KEY (source, position)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS chunk_places (
        row_id TEXT PRIMARY KEY REFERENCES document_chunks (row_id) ON DELETE CASCADE,
        page INTEGER, heading TEXT NOT NULL, line INTEGER) WITHOUT ROWID""",
    # Missing for chunks that earlier versions have listed.
    """CREATE TABLE IF NOT EXISTS chunk_texts (
        row_id TEXT PRIMARY KEY REFERENCES document_chunks (row_id) ON DELETE CASCADE,
        digest TEXT NOT NULL) WITHOUT ROWID""",
    # A number is never used twice, so it also tells a chunk from the same chunk added again.
    """CREATE TABLE IF NOT EXISTS chunks_without_vector (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        row_id TEXT NOT NULL UNIQUE REFERENCES document_chunks (row_id) ON DELETE CASCADE)""",
)
_DOCUMENT: Final = """SELECT source, version, digest, title, chunks, tokens, added_at, (
    SELECT json_group_array(note) FROM
        (SELECT note FROM document_notes WHERE source = documents.source ORDER BY position)) FROM documents"""
_CHUNK: Final = "SELECT row_id, source, position, kv_digest, kv_tokens FROM document_chunks"
_AT_PLACES: Final = """WHERE (source, position) IN
    (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?))"""


@dataclass(frozen=True, slots=True)
class ListedDocument:
    """A document as the knowledge base lists it; the first seven fields are the columns of its row.

    `source` is an absolute path, `version` identifies its rows in the vector index, `digest` is that of the file's bytes. `notes`
    are doubts about its text (see `Document`). If it is a copy, `same_as` is the source of the first document with the same
    bytes: a search returns a text once, even if several documents have it.
    """

    source: str
    version: str
    digest: str
    title: str
    chunks: int
    tokens: int
    added_at_s: float
    notes: tuple[str, ...] = ()
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """A chunk of a listed document, the one at `position` in it, from 0; `row_id` is its row in the vector index.

    Its KV has the key `kv_digest`, a digest of its `kv_tokens` token ids in a prompt.
    """

    row_id: str
    source: str
    position: int
    kv_digest: str
    kv_tokens: int


class DocumentTable:
    """The tables of documents, chunks, notes and places in `database`; creates missing ones."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def get(self, source: str) -> ListedDocument | None:
        """Return the document with this source, or None if it is not listed; its `same_as` is empty."""
        rows = self._database.query(f"{_DOCUMENT} WHERE source = ?", (source,))
        return _listed(*rows[0]) if rows else None

    def all_documents(self) -> list[ListedDocument]:
        """Return all documents, ordered by source."""
        first: dict[str, str] = {}  # digest -> source
        documents = []
        for row in self._database.query(f"{_DOCUMENT} ORDER BY source"):
            listed = _listed(*row)
            original = first.setdefault(listed.digest, listed.source)
            documents.append(listed if original == listed.source else replace(listed, same_as=original))
        return documents

    def count(self) -> int:
        """Return how many documents are listed."""
        return int(self._database.query("SELECT count(*) FROM documents")[0][0])

    def chunk_count(self) -> int:
        """Return how many chunks the listed documents have."""
        return int(self._database.query("SELECT coalesce(sum(chunks), 0) FROM documents")[0][0])

    def visible_versions(self) -> frozenset[str]:
        """Return the versions of all documents; the vector index may have rows of other versions, which do not count."""
        return frozenset(version for (version,) in self._database.query("SELECT version FROM documents"))

    def sources_under(self, path: str | Path) -> list[str]:
        """Return the sources that are `path` itself or below it, ordered. The path need not exist."""
        place = os.path.abspath(Path(path).expanduser())
        folder = place.rstrip(os.sep) + os.sep
        rows = self._database.query(
            "SELECT source FROM documents WHERE source = ? OR substr(source, 1, ?) = ? ORDER BY source",
            (place, len(folder), folder),
        )
        return [source for (source,) in rows]

    def all_chunks(self) -> list[ListedChunk]:
        """Return all chunks, ordered by source and position."""
        return [ListedChunk(*row) for row in self._database.query(f"{_CHUNK} ORDER BY source, position")]

    def without_vector_count(self) -> int:
        """Return how many listed chunks have no vector yet."""
        return int(self._database.query("SELECT count(*) FROM chunks_without_vector")[0][0])

    def without_vector(self, limit: int) -> dict[int, str]:
        """Return the row ids of up to `limit` chunks without a vector, the first added first; the keys are for `have_vector`."""
        return dict(
            self._database.query(
                "SELECT number, row_id FROM chunks_without_vector ORDER BY number LIMIT ?", (limit,)
            )
        )

    def have_vector(self, numbers: Iterable[int]) -> None:
        """Note that these chunks have a vector now, given by their keys from `without_vector`.

        A chunk that was added again in the meantime has another key and still counts as without a vector.
        """
        self._database.execute(
            "DELETE FROM chunks_without_vector WHERE number IN (SELECT value FROM json_each(?))",
            (json.dumps(list(numbers)),),
        )

    def chunks_at(self, places: Sequence[tuple[str, int]]) -> list[ListedChunk]:
        """Return the listed chunks at these sources and positions, in any order."""
        rows = self._database.query(f"{_CHUNK} {_AT_PLACES}", (json.dumps(places),))
        return [ListedChunk(*row) for row in rows]

    def places(self, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Place]:
        """Return the place, for people, of each chunk at these sources and positions; chunks without one are left out."""
        rows = self._database.query(
            "SELECT source, position, page, heading, line FROM document_chunks JOIN chunk_places USING (row_id) "
            + _AT_PLACES,
            (json.dumps(places),),
        )
        return {(source, position): Place(*place) for source, position, *place in rows}

    def damaged_texts(self, texts: Mapping[str, str]) -> list[str]:
        """Return the row ids whose texts are not those that were listed; rows that are not listed are left out."""
        rows = self._database.query(
            "SELECT row_id, digest FROM chunk_texts WHERE row_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(texts)),),
        )
        return [row for row, digest in rows if text_digest(texts[row]) != digest]

    def put(
        self,
        document: Document,
        chunks: Sequence[Chunk],
        kv_digests: Sequence[str],
        kv_tokens: Sequence[int],
        *,
        with_vectors: bool = True,
    ) -> ListedDocument:
        """List a document with its chunks, in place of an earlier version with the same source.

        Args:
            document: the document that was split.
            chunks: its n chunks in reading order.
            kv_digests: n digests, of each chunk's token ids in a prompt: the keys of its KV.
            kv_tokens: n numbers of those ids, which include the separator before the next chunk.
            with_vectors: whether the index has the chunks' vectors.
        """
        version = document_version(document.source, document.digest)
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        listed = ListedDocument(
            document.source,
            version,
            document.digest,
            document.title,
            len(chunks),
            tokens,
            time.time(),
            document.notes,
        )
        rows = [
            (row_id(version, n), document.source, n, digest, count)
            for n, (_, digest, count) in enumerate(zip(chunks, kv_digests, kv_tokens, strict=True))
        ]
        notes = [(document.source, n, note) for n, note in enumerate(document.notes)]
        texts = [(row_id(version, n), text_digest(chunk.text)) for n, chunk in enumerate(chunks)]
        places = [
            (row_id(version, n), *astuple(chunk.place))
            for n, chunk in enumerate(chunks)
            if chunk.place != Place()
        ]
        with self._database.transaction():
            self.remove(document.source)
            self._database.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(listed)[:7])
            self._database.execute_many("INSERT INTO document_chunks VALUES (?, ?, ?, ?, ?)", rows)
            if not with_vectors:
                self._database.execute_many(
                    "INSERT INTO chunks_without_vector (row_id) VALUES (?)", [row[:1] for row in rows]
                )
            self._database.execute_many("INSERT INTO document_notes VALUES (?, ?, ?)", notes)
            self._database.execute_many("INSERT INTO chunk_texts VALUES (?, ?)", texts)
            self._database.execute_many("INSERT INTO chunk_places VALUES (?, ?, ?, ?)", places)
        return listed

    def remove(self, source: str) -> ListedDocument | None:
        """Remove a document and its chunks from the list; return it as `get` does."""
        with self._database.transaction():
            listed = self.get(source)
            self._database.execute("DELETE FROM documents WHERE source = ?", (source,))
        return listed


def _listed(*row: Any) -> ListedDocument:
    *columns, notes = row
    return replace(ListedDocument(*columns), notes=tuple(json.loads(notes)))


def document_version(source: str, digest: str) -> str:
    """Return the id of a version of a document, made from its source and the digest of its bytes: 32 hex digits."""
    return hashlib.blake2b(json.dumps([source, digest]).encode(), digest_size=16).hexdigest()


def text_digest(text: str) -> str:
    """Return the digest of a chunk's text by which damage is found: 32 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def row_id(version: str, position: int) -> str:
    """Return the id of the chunk at a position (from 0) in a document's version; unique in a knowledge base."""
    return f"{version}:{position}"


def version_of(row: str) -> str:
    """Return the version that a row id contains; see `row_id`."""
    return row.rpartition(":")[0]
