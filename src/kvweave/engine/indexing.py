"""Documents in and out of a knowledge base: only what changed, and safe to interrupt at any moment.

A document becomes visible in one commit, when its chunks and vectors are written; the same commit drops
what an earlier version left. Chunk KV follows: every `add` computes what listed chunks lack, so that an
interrupted run, a raised limit or another recipe is caught up with.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvweave.config import DEFAULT_CHUNK_TOKENS, within_context
from kvweave.embedding import TextEncoder
from kvweave.engine.components import Components, ListedCorpus
from kvweave.engine.settings import Choices, KBMetadata
from kvweave.engine.state import SWEEP_GRACE_S, KnowledgeBaseState, Progress
from kvweave.errors import InaccessibleDocument, InvalidRequest, MissingExtra, StoreError, UnreadableDocument
from kvweave.index.chunking import Chunker
from kvweave.index.documents import ListedChunk, ListedDocument, document_id
from kvweave.index.readers import digest_file, find_files, read_document
from kvweave.index.vector_index import VectorIndex
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.offline import lacking, prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.types import AddReport, Chunk, Document, SkippedFile

BATCH_CHUNKS = 64  # chunks embedded and committed, or looked up and computed, at once


@dataclass(slots=True)
class _Tally:
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    chunks: int = 0


class Indexer:
    """Adds documents with one model, one chunker and one recipe's preparation."""

    def __init__(
        self,
        records: KnowledgeBaseState,
        bank: VectorIndex,
        encoder: TextEncoder,
        adapter: Adapter,
        chunker: Chunker,
        recipe: Recipe,
        system: str,
        own_folder: Path,
    ) -> None:
        self._records = records
        self._bank = bank
        self._encoder = encoder
        self._adapter = adapter
        self.chunker = chunker
        self._recipe = recipe
        self.system = system
        self._own_folder = own_folder  # what kvweave itself keeps is no document

    def add(self, paths: Sequence[Path], progress: Progress, settle: Callable[[], None]) -> AddReport:
        """Bring the knowledge base up to date with these files and folders.

        `settle` is called inside each commit: what the first documents are made with counts from then on.
        Raises PathNotFound before anything is done. Files that cannot be read are reported, not fatal.
        """
        began = time.perf_counter()
        found, skipped = find_files(paths)
        files = [path for path in found if not path.is_relative_to(self._own_folder)]
        skipped = [file for file in skipped if not file.path.is_relative_to(self._own_folder)]
        tally = _Tally(skipped=skipped, removed=self._drop_vanished(paths, files))
        indexed = self._bank.rows_by_version()
        waiting: list[tuple[Document, list[Chunk]]] = []
        for number, path in enumerate(files):
            progress("reading", number, len(files))
            read = self._read(path, indexed, tally)
            if read is not None:
                waiting.append(read)
                if sum(len(chunks) for _, chunks in waiting) >= BATCH_CHUNKS:
                    self._commit(waiting, tally, settle)
                    waiting = []
        if waiting:
            self._commit(waiting, tally, settle)
        progress("reading", len(files), len(files))
        visible = self._records.shelf.visible()
        if tally.chunks or indexed.keys() - visible:
            self._bank.sweep(visible, SWEEP_GRACE_S)
        computed, left_out = self._compute_kv({*tally.added, *tally.changed}, progress)
        return AddReport(
            added=tuple(tally.added),
            changed=tuple(tally.changed),
            unchanged=tuple(tally.unchanged),
            removed=tuple(tally.removed),
            skipped=tuple(tally.skipped),
            chunks=tally.chunks,
            chunk_kv_computed=computed,
            chunk_kv_left_out=left_out,
            seconds=time.perf_counter() - began,
        )

    # Documents

    def _drop_vanished(self, paths: Sequence[Path], files: Sequence[Path]) -> list[str]:
        """Documents that were indexed from these paths and are not files there any more.

        Nor under that name: a file is found once, and where a new link leads to it first, by the link's name.
        """
        present = {str(path) for path in files}
        reached = {os.path.realpath(path) for path in files}
        gone = {
            source
            for path in paths
            for source in self._records.shelf.sources_under(path)
            if source not in present and (_is_gone(source) or os.path.realpath(source) in reached)
        }
        for source in sorted(gone):
            self._records.remove(source)
        return sorted(gone)

    def _read(
        self, path: Path, indexed: dict[str, int], tally: _Tally
    ) -> tuple[Document, list[Chunk]] | None:
        """The document and its chunks if they are to be indexed; else None, and the tally says why."""
        source = str(path)
        listed = self._records.shelf.get(source)
        try:
            if listed is not None and _is_whole(listed, indexed) and listed.digest == digest_file(path):
                tally.unchanged.append(source)
                return None
            document = read_document(path)
            chunks = self.chunker.split(document)
            if not chunks:
                raise UnreadableDocument(f"{path} holds no text")
        except (InaccessibleDocument, MissingExtra) as error:
            # What is indexed of it may still be right: it stays.
            tally.skipped.append(SkippedFile(path, str(error)))
            return None
        except UnreadableDocument as error:
            tally.skipped.append(SkippedFile(path, str(error)))
            if listed is not None:  # it changed into something that cannot be read: the earlier text is gone
                self._records.remove(source)
                tally.removed.append(source)
            return None
        (tally.changed if listed is not None else tally.added).append(source)
        return document, chunks

    def _commit(
        self, waiting: list[tuple[Document, list[Chunk]]], tally: _Tally, settle: Callable[[], None]
    ) -> None:
        """Write vectors, then make the documents visible in one commit that also drops their old versions."""
        everything = [chunk for _, chunks in waiting for chunk in chunks]
        self._bank.add(everything, self._encoder.encode([chunk.text for chunk in everything]))
        with self._records.database.transaction():
            self._check_written(waiting)
            settle()
            for document, chunks in waiting:
                kv_ids = [self._adapter.template.framed(chunk.token_ids) for chunk in chunks]
                self._records.put(document, chunks, kv_ids)
        tally.chunks += len(everything)

    def _check_written(self, waiting: list[tuple[Document, list[Chunk]]]) -> None:
        """Nothing is listed whose rows went with the index: it is deleted under the lock that is held here."""
        chunks = {document_id(document.source, document.digest): len(those) for document, those in waiting}
        rows = self._bank.rows_of(chunks.keys())
        if any(rows.get(version, 0) < count for version, count in chunks.items()):
            raise StoreError(
                "another process has emptied the knowledge base just now; add the documents again"
            )

    # Chunk KV

    def _compute_kv(self, new: set[str], progress: Progress) -> tuple[int, int]:
        """Compute the KV that listed chunks lack; returns how many were computed and how many the limit left out."""
        ctx = self._shop()
        missing = self._missing(ctx, new)
        wanted = list(self._fitting(missing, new))
        total = sum(row.kv_tokens for row in wanted)
        done = computed = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress("computing KV", done, total)

        ctx, template = replace(ctx, progress=advance), self._adapter.template
        for start in range(0, len(wanted), BATCH_CHUNKS):
            batch = wanted[start : start + BATCH_CHUNKS]
            texts = self._bank.texts([row.row_id for row in batch])
            chunks = [template.chunk_ids(text) for text in texts.values()]
            computed += prepare_chunks(ctx, chunks, self._recipe)
        return computed, len(missing) - len(wanted)

    def missing_kv(self) -> int:
        """How many listed chunks, one per content, lack what the recipe prepares: KV, or what it records about them."""
        return len(self._missing(self._shop(), frozenset()))

    def _shop(self) -> PrepareContext:
        template, records = self._adapter.template, self._records
        corpus = ListedCorpus(records.shelf, self._bank, self._encoder, template)
        return PrepareContext(self._adapter, records.store, template.prefix_ids(self.system), corpus)

    def _missing(self, ctx: PrepareContext, first: Set[str]) -> list[tuple[ListedChunk, int]]:
        """Those chunks, with the bytes that what they lack takes; the ones of `first` before others."""
        rows = list({row.kv_digest: row for row in self._records.shelf.all_chunks()}.values())
        asked = [(row.kv_digest, row.kv_tokens) for row in rows]
        missing = [(rows[number], size) for number, size in lacking(ctx, asked, self._recipe).items()]
        return sorted(
            missing, key=lambda each: (each[0].source not in first, each[0].source, each[0].position)
        )

    def _fitting(self, missing: list[tuple[ListedChunk, int]], new: set[str]) -> Iterator[ListedChunk]:
        """What the limit has room for: new documents may push out what was never asked for, others take free room.

        Computing more would only evict what was just computed.
        """
        store = self._records.store
        free = store.limit_bytes - store.used_bytes
        for_new = free + store.unasked_bytes
        for row, size in missing:
            if size <= (for_new if row.source in new else free):
                free, for_new = free - size, for_new - size
                yield row


def _is_gone(source: str) -> bool:
    """Whether no file stands there any more; what cannot be looked at now may well be there."""
    try:
        return not stat.S_ISREG(os.stat(source).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _is_whole(listed: ListedDocument, indexed: dict[str, int]) -> bool:
    """Whether the index still holds every chunk of a document; a lost folder or table is noticed here."""
    return indexed.get(listed.version, 0) >= listed.chunks


@dataclass(frozen=True, slots=True)
class Additions:
    """Adds documents to what `records` lists; nothing under `own_folder`, where kvweave keeps its own, is one."""

    records: KnowledgeBaseState
    parts: Components
    choices: Choices
    terms: KBMetadata
    own_folder: Path

    def add(self, places: Sequence[Path], progress: Progress) -> AddReport:
        """Index files and folders; raises as `KnowledgeBase.add`."""
        indexer = self.indexer()
        report = indexer.add(places, progress, settle=lambda: self.settle(indexer))
        if report.changed or report.removed:
            self.records.empty_conversations()
        return report

    def missing_kv(self) -> int:
        """How many chunks lack what the recipe prepares."""
        return self.indexer().missing_kv() if self.records.shelf.visible() else 0

    def indexer(self) -> Indexer:
        """What adds documents. Settles nothing by itself; raises KnowledgeBaseMismatch and InvalidRequest."""
        recipe, adapter, system = self.choices.recipe(), self.parts.adapter, self.terms.system
        chunker = self._chunker(adapter, system)
        bank, encoder = self.parts.bank, self.parts.encoder
        return Indexer(self.records, bank, encoder, adapter, chunker, recipe, system, self.own_folder)

    def settle(self, indexer: Indexer) -> None:
        """Write down what documents are made with by this indexer; raises KnowledgeBaseMismatch, as another was faster."""
        encoder = self.parts.encoder
        facts = {
            "embedding": encoder.name,
            "dimensions": str(encoder.dimensions),
            "system": indexer.system,
            "chunk_tokens": str(indexer.chunker.chunk_tokens),
            "overlap_tokens": str(indexer.chunker.overlap_tokens),
        }
        self.terms.settle(self.parts.adapter.fingerprint, facts)

    def _chunker(self, adapter: Adapter, system: str) -> Chunker:
        """Cuts so that several chunks fit behind the instruction."""
        context_tokens = adapter.geometry.context_tokens
        chunk_tokens = self.terms.chunk_tokens(within_context(None, DEFAULT_CHUNK_TOKENS, context_tokens))
        overlap_tokens = self.terms.overlap_tokens
        around = len(adapter.template.prefix_ids(system)) + len(adapter.template.framed(()))
        room = context_tokens - around - 1  # a question has one token at least
        if chunk_tokens > room:
            raise InvalidRequest(
                f"chunk_tokens is {chunk_tokens}, but behind the instruction {adapter.fingerprint.name} has room for "
                f"{room}; use less, since several chunks and a question must fit together"
            )
        return Chunker(adapter.tokenizer, chunk_tokens, overlap_tokens)
