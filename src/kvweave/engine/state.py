"""What a knowledge base consists of, in one SQLite database. Light to import: `ls` and `rm` need no more."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvweave.answer_cache.cache import AnswerCache
from kvweave.config import Config
from kvweave.database import Database
from kvweave.engine.conversation_log import empty_outdated
from kvweave.errors import InvalidRequest
from kvweave.index.documents import DocumentTable
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.predict.store import PredictionStore
from kvweave.types import Chunk, Document

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "computing KV"), units done and units in all."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


SWEEP_GRACE_S: Final = 60.0
"""Index rows younger than this may belong to an `add` that runs in another process."""

_USABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USABLE = "letters, digits, '.', '_' and '-', 100 at most, a letter or digit first"


def checked_name(kind: Literal["knowledge base", "conversation"], name: str) -> str:
    """Return the name if a folder can have it; raises InvalidRequest."""
    if not _USABLE_NAME.fullmatch(name):
        raise InvalidRequest(f"{kind} name {name!r} is not usable: {_USABLE}")
    return name


def kb_folder(name: str, config: Config) -> Path:
    """Return the folder of a knowledge base; raises InvalidRequest for an unusable name."""
    return config.home / "kb" / checked_name("knowledge base", name)


@dataclass(frozen=True, slots=True)
class KnowledgeBaseState:
    """The tables that say which documents exist and what belongs to them; changes to them commit together.

    `conversations` is a folder of files, outside the transaction: a conversation is compared with the document list
    before it is used.
    """

    database: Database
    documents: DocumentTable
    store: ChunkStore
    answers: AnswerCache
    predictions: PredictionStore
    conversations: Path

    def put(self, document: Document, chunks: Sequence[Chunk], kv_ids: Sequence[Sequence[int]]) -> None:
        """Make a document visible in place of its earlier version, in one commit.

        `kv_ids` are the tokens that each chunk's KV is made of.
        """
        kv_digests = [digest_tokens(ids) for ids in kv_ids]
        with self.database.transaction():
            earlier = self.documents.get(document.source)
            listed = self.documents.put(document, chunks, kv_digests, [len(ids) for ids in kv_ids])
            # Own before disown, so that unchanged chunks keep their KV.
            self.store.own(listed.version, kv_digests)
            gone = [earlier.version] if earlier is not None and earlier.version != listed.version else []
            for version in gone:
                self.store.disown(version)
            self._forget(gone)

    def remove(self, source: str) -> str | None:
        """Remove a document with its chunks, KV, cached answers and predictions, in one commit.

        Returns its version, None if it was not listed.
        """
        with self.database.transaction():
            listed = self.documents.remove(source)
            if listed is None:
                return None
            self.store.disown(listed.version)
            self._forget([listed.version])
        return listed.version

    def empty_conversations(self) -> None:
        """Delete the text of conversations that have read removed documents; raises StoreError.

        They could not be continued anyway: this frees the disk and removes what they quoted.
        """
        empty_outdated(self.conversations, self.documents.visible_versions())

    def close(self) -> None:
        """Write counters and close files; closing twice is fine."""
        if not self.database.closed:
            self.store.close()
            self.database.close()

    def _forget(self, versions: Sequence[str]) -> None:
        """Drop the answers and predictions made from document versions."""
        self.answers.documents_changed(versions)
        self.answers.delete(self.predictions.documents_changed(versions))


def open_state(folder: Path, name: str, config: Config) -> KnowledgeBaseState:
    """Open the knowledge base in `folder`, creating it if it is not there; raises StoreError."""
    with ExitStack() as undo:  # closes what was opened if the rest cannot be
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
        state = KnowledgeBaseState(
            database, DocumentTable(database), store, answers, predictions, folder / "conversations"
        )
        undo.pop_all()
    return state
