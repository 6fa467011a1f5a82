"""What a knowledge base consists of, as SQLite lists it; light to import, since `ls` and `rm` need no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvweave.core import Chunk, Document
from kvweave.knowledge.shelf import Shelf
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.database import Database
from kvweave.store.keys import digest_tokens

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "computing KV"), units done and units in all."""

SWEEP_GRACE_S = 60.0  # rows of the index younger than this may belong to another process's `add` under way


@dataclass(frozen=True, slots=True)
class Records:
    """What says which documents exist and what belongs to them; everything here commits together."""

    database: Database
    shelf: Shelf
    store: ChunkStore

    def remove(self, source: str) -> str | None:
        """Take a document out: after the commit none of its chunks, vectors or KV can be found any more.

        Returns the version it had in the bank, None if it was not listed.
        """
        with self.database.transaction():
            listed = self.shelf.remove(source)
            if listed is None:
                return None
            self.store.disown(listed.version)
        return listed.version

    def put(self, document: Document, chunks: Sequence[Chunk], kv_ids: Sequence[Sequence[int]]) -> None:
        """Make a document visible in place of its earlier version; `kv_ids` are the tokens its chunks' KV is made of."""
        kv_digests = [digest_tokens(ids) for ids in kv_ids]
        with self.database.transaction():
            earlier = self.shelf.get(document.source)
            listed = self.shelf.put(document, chunks, kv_digests, [len(ids) for ids in kv_ids])
            # Owned anew before the earlier version lets go, so that unchanged chunks keep their KV.
            self.store.own(listed.version, kv_digests)
            if earlier is not None and earlier.version != listed.version:
                self.store.disown(earlier.version)
