"""What a knowledge base consists of, in one SQLite database. Light to import: `ls` and `rm` need no more."""

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.predictions import PredictionStore
from kvweave.config import Config
from kvweave.database import Database, FactTable
from kvweave.errors import InvalidRequest, PathNotFound
from kvweave.files import make_folder, try_lock
from kvweave.index.documents import DocumentTable
from kvweave.kvstore.keys import digest_tokens
from kvweave.once import once
from kvweave.state.background_budget import BackgroundBudget
from kvweave.state.calibration_results import CalibrationTable
from kvweave.state.conversation_log import empty_outdated
from kvweave.state.metadata import KBMetadata
from kvweave.state.preparation import Preparation, preparation_key
from kvweave.types import Chunk, Document

if TYPE_CHECKING:
    from kvweave.kvstore.chunk_store import ChunkStore

Progress = Callable[[str, int, int], None]
"""Called with the stage ("reading", "embedding", "computing KV"), units done and units in all."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


SWEEP_GRACE_S: Final = 60.0
"""Index rows younger than this may belong to an `add` that runs in another process."""

_REMOVED_TEXT: Final = "removed text"
"""The fact that text of removed documents may be in conversations, and left in the database and its log."""

_USABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USABLE = "letters, digits, '.', '_' and '-', 100 at most, a letter or digit first"


def checked_name(kind: Literal["knowledge base", "conversation", "tenant"], name: str) -> str:
    """Return the name if a folder can have it; raises InvalidRequest."""
    if not _USABLE_NAME.fullmatch(name):
        raise InvalidRequest(f"{kind} name {name!r} is not usable: {_USABLE}")
    return name


def kb_folder(name: str, config: Config) -> Path:
    """Return the folder of a knowledge base; raises InvalidRequest for an unusable name."""
    return config.home / "kb" / checked_name("knowledge base", name)


def existing_kbs(config: Config) -> str:
    """Return which knowledge bases there are, as part of a sentence."""
    names = sorted(path.parent.name for path in (config.home / "kb").glob("*/catalog.sqlite"))
    return f"there are {', '.join(names)}" if names else "there is none yet"


def with_recorded_models(config: Config, name: str) -> Config:
    """Return the settings; what they leave open of the models is as the knowledge base `name` records it, if it is there."""
    path = kb_folder(name, config) / "catalog.sqlite"
    if not path.exists():
        return config
    with closing(Database(path)) as database:
        metadata = KBMetadata(database, name, config)
        model = metadata.model_settings
        embedding = config.embedding.embedding_model or metadata.get("embedding_source")
    return replace(config, model=model, embedding=replace(config.embedding, embedding_model=embedding))


class KnowledgeBaseState:
    """The tables that say which documents exist and what belongs to them; changes to them commit together.

    Opens the knowledge base in `folder`, and creates it if it is not there. `conversations` is a folder of files, outside the
    transaction: a conversation is compared with the document list before it is used. `namespace` names its entries in a shared
    tier; None is its own name.

    Raises:
        StoreError: the database cannot be used.
    """

    def __init__(self, folder: Path, name: str, config: Config, namespace: str | None = None) -> None:
        self._folder, self._config = folder, config
        self._namespace = namespace or name
        self.idle_lock = folder / "idle.lock"  # of background work and calibration
        self.trials = folder / "calibration"  # KV of the budgets that calibration tries
        with suppress(OSError):  # the database says what is wrong
            make_folder(folder)
        with ExitStack() as undo:  # closes what was opened if the rest cannot be
            self.database = Database(folder / "catalog.sqlite")
            undo.callback(self.database.close)
            self.documents = DocumentTable(self.database)
            self.answers = AnswerCache(self.database, config.answers.answer_limit_bytes)
            self.predictions = PredictionStore(self.database)
            self.calibrations = CalibrationTable(self.database)
            self.background_budget = BackgroundBudget(self.database)
            self.facts = FactTable(self.database, "idle_facts")
            self.preparation = Preparation(self.database, self.facts, folder, preparation_key(config))
            self.conversations = folder / "conversations"
            if config.store.shared is not None:
                _ = self.store  # a wrong address is refused now
            undo.pop_all()

    @once
    def store(self) -> "ChunkStore":
        """The store of chunk KV, opened at the first access: it needs PyTorch, and listing documents does not need it.

        Never open it inside a transaction: it creates its tables.
        """
        from kvweave.kvstore.chunk_store import ChunkStore

        settings = self._config.store
        return ChunkStore(
            self._folder / "kv",
            namespace=self._namespace,
            limit_bytes=settings.limit_bytes,
            host_bytes=settings.host_bytes,
            shared=settings.shared,
            shared_bytes=settings.shared_bytes,
            database=self.database,
            owned_only=True,  # KV of a document that is removed meanwhile must not be kept
        )

    def put(
        self,
        document: Document,
        chunks: Sequence[Chunk],
        kv_ids: Sequence[Sequence[int]],
        *,
        with_vectors: bool,
    ) -> None:
        """Make a document visible in place of its earlier version, in one commit.

        `kv_ids` are the tokens that each chunk's KV is made of; `with_vectors` says whether the index has the chunks' vectors.
        """
        kv_digests, store = [digest_tokens(ids) for ids in kv_ids], self.store
        with self.database.transaction():
            self.preparation.mark()  # before: documents added since then are prepared first
            earlier = self.documents.get(document.source)
            listed = self.documents.put(
                document, chunks, kv_digests, [len(ids) for ids in kv_ids], with_vectors=with_vectors
            )
            # Own before disown, so that unchanged chunks keep their KV.
            store.own(listed.version, kv_digests)
            gone = [earlier.version] if earlier is not None and earlier.version != listed.version else []
            for version in gone:
                store.disown(version)
            self._forget(gone)
            if gone:
                self.facts.record(_REMOVED_TEXT, 1.0)
        self.database.after_commit(self._drop_trials)

    def have_vector(self, numbers: Sequence[int]) -> None:
        """Note that chunks of `DocumentTable.without_vector` have one now: questions may find others than before."""
        with self.database.transaction():
            self.documents.have_vector(numbers)
            self.answers.documents_changed()

    def remove(self, source: str) -> str | None:
        """Remove a document with its chunks, KV, cached answers and predictions, in one commit.

        Returns its version, None if it was not listed. Raises StoreReadOnly.
        """
        self.database.check_writable()
        store = self.store
        with self.database.transaction():
            listed = self.documents.remove(source)
            if listed is None:
                return None
            store.disown(listed.version)
            self._forget([listed.version])
            self.preparation.mark_removed()
            self.facts.record(_REMOVED_TEXT, 1.0)
        self.database.after_commit(self._drop_trials)
        return listed.version

    @property
    def has_removed_text(self) -> bool:
        """Whether `forget_removed_text` has something to do: a process may have been killed before it did that."""
        return bool(self.facts.get(_REMOVED_TEXT))

    def forget_removed_text(self) -> None:
        """Delete the text of conversations that have read removed documents, and what is left in the database; raises StoreError.

        The conversations could not be continued anyway: this frees the disk and removes what they quoted. Where nothing was
        removed, nothing is done.
        """
        if not self.has_removed_text:
            return
        empty_outdated(self.conversations, self.documents.visible_versions())
        if self.database.scrub():
            self.facts.record(_REMOVED_TEXT, 0.0)

    def close(self) -> None:
        """Write counters and close files; closing twice is fine."""
        if not self.database.closed:
            store = self.__dict__.get("store")
            if store is not None:
                store.close()
            self.database.close()

    def _forget(self, versions: Sequence[str]) -> None:
        """Drop the answers and predictions made from document versions."""
        self.answers.documents_changed(versions)
        self.answers.delete(self.predictions.documents_changed(versions))
        self.calibrations.documents_changed()

    def _drop_trials(self) -> None:
        """Delete KV that a killed calibration has left; a running one does so itself when the documents change."""
        if self.trials.exists():
            with try_lock(self.idle_lock) as free:
                if free:
                    shutil.rmtree(self.trials, ignore_errors=True)


def absolute(path: str | Path) -> Path:
    """Return a path as absolute; raises InvalidRequest for an empty one, which would mean the working folder."""
    if not str(path):
        raise InvalidRequest("a path is empty; name a file or folder ('.' for this one)")
    return Path(path).expanduser().absolute()


def existing_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Return paths to add; raises PathNotFound for one that does not exist, InvalidRequest if there are none."""
    if not paths:
        raise InvalidRequest("no paths to add")
    found = [absolute(path) for path in paths]
    for path in found:
        if not path.exists():
            raise PathNotFound(f"{path} does not exist")
    return found


def sources_from(kb: str, documents: DocumentTable, path: str | Path) -> list[str]:
    """Return the sources of a knowledge base's document with its attachments, or of all its documents under a folder.

    Raises PathNotFound if nothing is indexed from the path.
    """
    place = absolute(path)
    found = documents.sources_under(place)  # of a file too: attachments are under their e-mail
    if not found:
        raise PathNotFound(f"nothing in knowledge base {kb!r} comes from {place}; `kvweave ls` lists it")
    return found
