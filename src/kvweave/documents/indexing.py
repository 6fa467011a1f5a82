"""Adds new and changed documents to a knowledge base. An `add` may be interrupted at any moment.

A document becomes visible in one commit, once its chunks are written; the same commit drops its earlier version. From then
on questions can use it. If the chunks are few, or the caller waits, they are written with their vectors. Otherwise their vectors
follow later, as their KV does (`chunk_preparation.py`). Every `add` also looks for listed chunks that lack a vector or KV. This
repairs interrupted runs and applies a new limit or recipe.
"""

import os
import stat
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from kvweave.config import DEFAULT_CHUNK_TOKENS
from kvweave.documents.chunk_preparation import ChunkPreparer
from kvweave.documents.chunking import Chunker
from kvweave.documents.files import MAILS, content_suffix, find_files, outer_file
from kvweave.documents.formats.mail import message_ids
from kvweave.documents.reader_process import FileReader
from kvweave.documents.readers import ReadFile, digest_file
from kvweave.errors import InaccessibleDocument, InvalidRequest, MissingExtra, StoreError, UnreadableDocument
from kvweave.index.documents import ListedDocument, document_version
from kvweave.models.gguf.conversions import reporting
from kvweave.options import within_context
from kvweave.results import AddReport, CopiedDocument, DocumentNote, SkippedFile
from kvweave.state.components import Components
from kvweave.state.knowledge_base_state import SWEEP_GRACE_S, KnowledgeBaseState, Progress
from kvweave.state.metadata import KBMetadata
from kvweave.types import Chunk, Document

BATCH_CHUNKS: Final = 64
"""Chunks that are committed at once. An `add` of fewer chunks embeds them before it commits them."""

Pending = list[tuple[Document, list[Chunk]]]


@dataclass(frozen=True, slots=True)
class Indexer:
    """Adds documents to a knowledge base; skips files under `own_folder`, where kvweave stores its own."""

    state: KnowledgeBaseState
    components: Components
    metadata: KBMetadata
    preparer: ChunkPreparer
    own_folder: Path

    def add(
        self,
        paths: Sequence[Path],
        progress: Progress,
        *,
        wait: bool,
        only: Set[Path] | None = None,
        allow_empty: bool = False,
    ) -> AddReport:
        """Bring the knowledge base up to date with these files and folders, and report files that cannot be read.

        Args:
            paths: files and folders.
            progress: see `Progress`.
            wait: compute chunk KV too. Otherwise the report counts the chunks that wait for their KV.
            only: the files that may have changed; None means that any file may have.
            allow_empty: remove the documents of a folder that is empty now. Otherwise they are kept.

        Raises the errors of `KnowledgeBase.add`, before anything is changed.
        """
        began = time.perf_counter()
        self.state.database.check_writable()
        self.preparer.check()
        with reporting(progress):
            report = IndexRun(self, progress, wait=wait).add(paths, only, allow_empty=allow_empty)
            self.state.forget_removed_text()
            if wait:
                done = self.preparer.run(progress)
                report = replace(report, chunk_kv_computed=done.computed, chunk_kv_left_out=done.left_out)
            else:
                left, left_out = self.preparer.left()
                report = replace(
                    report,
                    chunk_kv_left_out=left_out,
                    chunk_kv_waiting=left.left,
                    vectors_waiting=left.left_without_vector,
                )
        return replace(report, seconds=time.perf_counter() - began)


@dataclass(slots=True)
class _Tally:
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    skipped: list[SkippedFile] = field(default_factory=list)
    notes: list[DocumentNote] = field(default_factory=list)
    chunks: int = 0


class IndexRun:
    """One `add`, with the models and settings that the knowledge base has when it starts.

    With `wait`, all chunks are committed with their vectors.

    Raises:
        KnowledgeBaseMismatch: the settings contradict the ones that the knowledge base was made with.
        InvalidRequest: chunks of the chosen length do not fit the model.
    """

    def __init__(self, indexer: Indexer, progress: Progress, *, wait: bool) -> None:
        self._wait = wait
        components = indexer.components
        self._state, self._metadata = indexer.state, indexer.metadata
        self._own_folder, self._progress = indexer.own_folder, progress
        self._model, self._system = components.model, indexer.metadata.system
        self._chunker = self._make_chunker()
        self._index, self._encoder = components.index, components.encoder
        self._tally = _Tally()

    def _make_chunker(self) -> Chunker:
        """Return a chunker whose chunks fit into the model's context behind the instruction."""
        model = self._model
        context_tokens = model.geometry.context_tokens
        chunk_tokens = self._metadata.chunk_tokens(within_context(None, DEFAULT_CHUNK_TOKENS, context_tokens))
        around = len(model.template.prefix_ids(self._system)) + len(model.template.with_separator(()))
        room = context_tokens - around - 1  # a question has at least one token
        if chunk_tokens > room:
            raise InvalidRequest(
                f"chunk_tokens is {chunk_tokens}, but behind the instruction {model.fingerprint.name} has room for "
                f"{room}; use less, since several chunks and a question must fit together"
            )
        return Chunker(model.tokenizer, chunk_tokens, self._metadata.overlap_tokens)

    def add(
        self, paths: Sequence[Path], only: Set[Path] | None = None, *, allow_empty: bool = False
    ) -> AddReport:
        """Read and commit the documents that have changed; see `Indexer.add`."""
        tally, began_s = self._tally, time.time()
        before = self._state.documents.visible_versions()
        every, skipped = find_files(paths)
        files = [path for path in every if not path.is_relative_to(self._own_folder)]
        tally.skipped = [file for file in skipped if not file.path.is_relative_to(self._own_folder)]
        found = [*files, *(each.path for each in tally.skipped)]
        occupied = {*files, *(folder for path in found for folder in path.parents)}
        self._remove_vanished(paths, files, None if allow_empty else occupied)
        indexed = self._index.rows_by_version()
        self._remove_moved(files)  # before a file changes that was moved earlier
        self._read_and_commit(files, indexed, only)
        self._remove_moved(files)
        visible = self._state.documents.visible_versions()
        self._index.delete(before - visible, before_s=began_s)
        if tally.chunks or indexed.keys() - visible or self._index.has_old_files:
            self._index.sweep(visible, SWEEP_GRACE_S)
        return AddReport(
            added=tuple(tally.added),
            changed=tuple(tally.changed),
            unchanged=tuple(tally.unchanged),
            removed=tuple(tally.removed),
            skipped=tuple(tally.skipped),
            chunks=tally.chunks,
            notes=tuple(tally.notes),
            copies=self._copies({*tally.added, *tally.changed}),
            kept=tuple(sorted(tally.kept.difference(tally.removed))),
        )

    def _copies(self, sources: Set[str]) -> tuple[CopiedDocument, ...]:
        """Return the copies that are among these documents, or have the same bytes as one of them."""
        if not sources:
            return ()
        return tuple(
            CopiedDocument(Path(each.source), Path(each.same_as))
            for each in self._state.documents.all_documents()
            if each.same_as and (each.source in sources or each.same_as in sources)
        )

    # Documents

    def _remove_vanished(
        self, paths: Sequence[Path], files: Sequence[Path], occupied: Set[Path] | None
    ) -> None:
        """Remove the documents that were indexed from these paths and whose files are gone.

        Keep those whose folder has no files any more, as where a disk is not mounted: `occupied` are the folders that have some.
        With None, remove those too.

        A file is found once, however many links lead to it. If a new link is found first, the document under the old name
        is removed.
        """
        present = {str(path) for path in files}
        reached = {os.path.realpath(path) for path in files}
        vanished = {
            source
            for path in paths
            for source in self._state.documents.sources_under(path)
            if source not in present
            and outer_file(source) not in present  # an attachment stays or goes with its e-mail
            and (is_gone(source) or os.path.realpath(source) in reached)
        }
        if occupied is not None:
            self._tally.kept = {each for each in vanished if _existing_folder(each) not in occupied}
        self._drop(vanished.difference(self._tally.kept))

    def _remove_moved(self, files: Sequence[Path]) -> None:
        """Remove the documents whose files are gone and whose bytes are in one of these files: they were moved there.

        Otherwise their text would be found under the old name, even after the file has changed.
        """
        present = {str(path) for path in files}
        listed = self._state.documents.all_documents()
        shared = {each.digest for each in listed if each.same_as}
        documents = [each for each in listed if each.digest in shared]
        outer = {each.source: outer_file(each.source) for each in documents}
        here = {each.digest for each in documents if outer[each.source] in present}
        self._drop(
            each.source
            for each in documents
            if each.digest in here and outer[each.source] not in present and is_gone(outer[each.source])
        )

    def _read_and_commit(
        self, files: Sequence[Path], indexed: dict[str, int], only: Set[Path] | None
    ) -> None:
        """Read the files (of them only those in `only`, if given), and commit batches of about BATCH_CHUNKS chunks."""
        pending: Pending = []
        mails = [path for path in files if content_suffix(path.name) in MAILS]
        files = [path for path in files if only is None or path in only]
        with FileReader(message_ids(mails)) as reader:
            for number, path in enumerate(files):
                self._progress("reading", number, len(files))
                pending += self._read(path, indexed, reader)
                if sum(len(chunks) for _, chunks in pending) >= BATCH_CHUNKS:
                    self._commit(pending, with_vectors=self._wait)
                    pending = []
        if pending:
            self._commit(pending, with_vectors=self._wait or not self._tally.chunks)
        self._progress("reading", len(files), len(files))

    def _read(self, path: Path, indexed: dict[str, int], reader: FileReader) -> Pending:
        """Return the file's new and changed documents with their chunks; count the others in the tally."""
        source, tally, documents = str(path), self._tally, self._state.documents
        inside = documents.sources_under(path) if content_suffix(path.name) in MAILS else []
        earlier = {each: found for each in {source, *inside} if (found := documents.get(each)) is not None}
        listed, whole = earlier.get(source), all(_is_whole(each, indexed) for each in earlier.values())
        try:
            if listed is not None and whole and listed.digest == digest_file(path):
                tally.unchanged += sorted(earlier)
                return []
            read = reader.read(path)
        except (InaccessibleDocument, MissingExtra) as error:
            # The file may be unchanged, so its documents stay indexed.
            tally.skipped.append(SkippedFile(path, str(error)))
            return []
        except UnreadableDocument as error:
            tally.skipped.append(SkippedFile(path, str(error)))
            self._drop(earlier)  # the file has changed, so the earlier text is no longer right
            return []
        return self._split(read, earlier, indexed)

    def _split(self, found: ReadFile, earlier: dict[str, ListedDocument], indexed: dict[str, int]) -> Pending:
        """Cut the new and changed documents of a file into chunks, and remove documents that the file no longer has."""
        tally, pending = self._tally, Pending()
        tally.skipped += found.skipped
        present = set()
        for document in found.documents:
            before = earlier.get(document.source)
            chunks = self._chunker.split(document)
            if not chunks:
                tally.skipped.append(SkippedFile(Path(document.source), "there is no text in the file"))
                continue
            present.add(document.source)
            same = before is not None and before.digest == document.digest and _is_whole(before, indexed)
            if same and document is not found.documents[0]:
                tally.unchanged.append(document.source)
                continue
            (tally.added if before is None else tally.changed).append(document.source)
            tally.notes += [DocumentNote(Path(document.source), note) for note in document.notes]
            pending.append((document, chunks))
        self._drop(earlier.keys() - present)
        return pending

    def _drop(self, sources: Iterable[str]) -> None:
        for source in sorted(set(sources)):
            self._state.remove(source)
            self._tally.removed.append(source)

    def _commit(self, pending: Pending, *, with_vectors: bool) -> None:
        """Write chunks, then make the documents visible in one commit that also drops their old versions."""
        everything = [chunk for _, chunks in pending for chunk in chunks]
        vectors = self._encoder.encode([chunk.text for chunk in everything]) if with_vectors else None
        self._index.add(everything, vectors)
        with self._state.database.transaction():
            self._check_written(pending)
            self._metadata.record(self._model.fingerprint, self._facts)
            for document, chunks in pending:
                kv_ids = [self._model.template.with_separator(chunk.token_ids) for chunk in chunks]
                self._state.put(document, chunks, kv_ids, with_vectors=with_vectors)
        self._tally.chunks += len(everything)

    @cached_property
    def _facts(self) -> dict[str, str]:
        return {
            "embedding": self._encoder.name,
            "dimensions": str(self._encoder.dimensions),
            "system": self._system,
            "chunk_tokens": str(self._chunker.chunk_tokens),
            "overlap_tokens": str(self._chunker.overlap_tokens),
        }

    def _check_written(self, pending: Pending) -> None:
        """Raise StoreError if another process has deleted the index. It cannot do so while this one holds the lock."""
        chunks = {
            document_version(document.source, document.digest): len(those) for document, those in pending
        }
        rows = self._index.rows_by_version(chunks.keys())
        if any(rows.get(version, 0) < count for version, count in chunks.items()):
            raise StoreError(
                "another process has emptied the knowledge base just now; add the documents again"
            )


def is_gone(source: str) -> bool:
    """Return whether the file no longer exists; a file that cannot be accessed may still exist."""
    try:
        return not stat.S_ISREG(os.stat(source).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _existing_folder(source: str) -> Path:
    """Return the innermost folder of a file that is gone which exists; it may be a link to nothing."""
    return next(folder for folder in Path(source).parents if os.path.lexists(folder))


def _is_whole(listed: ListedDocument, indexed: dict[str, int]) -> bool:
    """Return whether the index still holds every chunk of a document; it does not if its folder or table was lost."""
    return indexed.get(listed.version, 0) >= listed.chunks
