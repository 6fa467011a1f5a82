"""What a knowledge base consists of, as SQLite lists it; light to import, since `ls` and `rm` need no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvweave.core import Chunk, Document
from kvweave.knowledge.shelf import Shelf, document_id
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.database import Database

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "computing KV"), units done and units in all."""

SWEEP_GRACE_S = 60.0  # rows of the index younger than this may belong to another process's `add` under way


class Pending:
    """Sources whose chunk KV has not been computed to the end."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(("CREATE TABLE IF NOT EXISTS pending (source TEXT PRIMARY KEY)",))

    def add(self, source: str) -> None:
        """Note that a document's KV is to be computed."""
        self._database.execute("INSERT OR IGNORE INTO pending VALUES (?)", (source,))

    def done(self, source: str) -> None:
        """Forget a document: its KV was computed, or it was removed."""
        self._database.execute("DELETE FROM pending WHERE source = ?", (source,))

    def sources(self) -> list[str]:
        """All pending documents, sorted."""
        return [str(row[0]) for row in self._database.query("SELECT source FROM pending ORDER BY source")]


@dataclass(frozen=True, slots=True)
class Records:
    """What says which documents exist and what belongs to them; everything here commits together."""

    database: Database
    shelf: Shelf
    store: ChunkStore
    pending: Pending

    def remove(self, source: str) -> None:
        """Take a document out: after the commit none of its chunks, vectors or KV can be found any more."""
        with self.database.transaction():
            listed = self.shelf.get(source)
            if listed is not None:
                self.store.disown(document_id(source, listed.digest))
            self.shelf.remove(source)
            self.pending.done(source)

    def put(self, document: Document, chunks: Sequence[Chunk], kv_digests: Sequence[str]) -> None:
        """Make a document visible in place of its earlier version, with the token digests its KV will have."""
        with self.database.transaction():
            earlier = self.shelf.get(document.source)
            # Owned anew before the earlier version lets go, so that unchanged chunks keep their KV.
            self.store.own(document_id(document.source, document.digest), kv_digests)
            if earlier is not None and earlier.digest != document.digest:
                self.store.disown(document_id(document.source, earlier.digest))
            self.shelf.put(document, chunks)
            self.pending.add(document.source)
