"""What a knowledge base consists of, as SQLite lists it; light to import, since `ls` and `rm` need no more."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvweave.answer_cache.cache import AnswerCache
from kvweave.config import Config
from kvweave.database import Database
from kvweave.engine.conversation_log import empty_outdated
from kvweave.index.documents import DocumentTable
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.predict.store import PredictionStore
from kvweave.types import Chunk, Document

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "computing KV"), units done and units in all."""

SWEEP_GRACE_S = 60.0  # rows of the index younger than this may belong to another process's `add` under way


@dataclass(frozen=True, slots=True)
class KnowledgeBaseState:
    """What says which documents exist and what belongs to them; everything here commits together.

    But for the `conversations`, files in a folder: what they read is compared with the list before it is used.
    """

    database: Database
    shelf: DocumentTable
    store: ChunkStore
    answers: AnswerCache
    predictions: PredictionStore
    conversations: Path

    def remove(self, source: str) -> str | None:
        """Take a document out: after the commit none of its chunks, vectors or KV can be found, no answer from it given.

        Returns the version it had in the bank, None if it was not listed.
        """
        with self.database.transaction():
            listed = self.shelf.remove(source)
            if listed is None:
                return None
            self.store.disown(listed.version)
            self._forget([listed.version])
        return listed.version

    def put(self, document: Document, chunks: Sequence[Chunk], kv_ids: Sequence[Sequence[int]]) -> None:
        """Make a document visible in place of its earlier version; `kv_ids` are the tokens its chunks' KV is made of."""
        kv_digests = [digest_tokens(ids) for ids in kv_ids]
        with self.database.transaction():
            earlier = self.shelf.get(document.source)
            listed = self.shelf.put(document, chunks, kv_digests, [len(ids) for ids in kv_ids])
            # Owned anew before the earlier version lets go, so that unchanged chunks keep their KV.
            self.store.own(listed.version, kv_digests)
            gone = [earlier.version] if earlier is not None and earlier.version != listed.version else []
            for version in gone:
                self.store.disown(version)
            self._forget(gone)

    def empty_conversations(self) -> None:
        """Delete what was said over documents that are not listed any more, worth doing when some were taken out.

        It would not be gone on with anyway. Raises StoreError.
        """
        empty_outdated(self.conversations, self.shelf.visible())

    def close(self) -> None:
        """Write counters and close files; a second time does nothing."""
        if not self.database.closed:
            self.store.close()
            self.database.close()

    def _forget(self, gone: Sequence[str]) -> None:
        """Whatever else these versions have led to."""
        self.answers.documents_changed(gone)
        self.answers.forget(self.predictions.documents_changed(gone))


def open_records(folder: Path, name: str, config: Config) -> KnowledgeBaseState:
    """The records of the knowledge base in `folder`, made if they are not there; raises StoreError."""
    with ExitStack() as undo:  # whatever is opened, if the rest cannot be
        database = Database(folder / "catalog.sqlite")
        undo.callback(database.close)
        store = ChunkStore(
            folder / "kv",
            namespace=name,
            limit_bytes=config.store.limit_bytes,
            host_bytes=config.store.host_bytes,
            shared=config.store.shared,
            shared_bytes=config.store.shared_bytes,
            database=database,
            owned_only=True,  # KV of a document that is removed meanwhile must not be kept
        )
        undo.callback(store.close)
        answers = AnswerCache(database, config.answers.answer_limit_bytes)
        predictions = PredictionStore(database)
        records = KnowledgeBaseState(
            database, DocumentTable(database), store, answers, predictions, folder / "conversations"
        )
        undo.pop_all()
    return records
