"""Documents in and out of a knowledge base: only what changed, and safe to interrupt at any moment.

A document becomes visible in one commit, when its chunks and vectors are written; the same commit drops
what an earlier version left. Its chunk KV follows, chunk by chunk; until all of it has been computed once
the document is listed as pending, and the next `add` goes on there.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvweave.core import AddReport, Chunk, Document, SkippedFile
from kvweave.embedding.encoder import TextEncoder
from kvweave.engine.records import SWEEP_GRACE_S, Progress, Records
from kvweave.errors import DocumentError, UnreadableDocument
from kvweave.knowledge.bank import ChunkBank
from kvweave.knowledge.chunking import Chunker
from kvweave.knowledge.reading import digest_file, find_files, read_document
from kvweave.models.adapter import Adapter
from kvweave.recipes.prepare import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.store.keys import digest_tokens

BATCH_CHUNKS = 64  # chunks embedded and committed at once


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
        records: Records,
        bank: ChunkBank,
        encoder: TextEncoder,
        adapter: Adapter,
        chunker: Chunker,
        recipe: Recipe,
        system: str,
    ) -> None:
        self._records = records
        self._bank = bank
        self._encoder = encoder
        self._adapter = adapter
        self._chunker = chunker
        self._recipe = recipe
        self._system = system

    def add(self, paths: Sequence[Path], progress: Progress) -> AddReport:
        """Bring the knowledge base up to date with these files and folders.

        Raises PathNotFound before anything is done. Files that cannot be read are reported, not fatal.
        """
        began = time.perf_counter()
        files, skipped = find_files(paths)
        tally = _Tally(skipped=list(skipped), removed=self._drop_vanished(paths, files))
        waiting: list[tuple[Document, list[Chunk]]] = []
        for number, path in enumerate(files):
            progress("reading", number, len(files))
            read = self._read(path, tally)
            if read is not None:
                waiting.append(read)
                if sum(len(chunks) for _, chunks in waiting) >= BATCH_CHUNKS:
                    self._commit(waiting, tally)
                    waiting = []
        self._commit(waiting, tally)
        progress("reading", len(files), len(files))
        if tally.added or tally.changed or tally.removed:
            self._bank.sweep(self._records.shelf.visible(), SWEEP_GRACE_S)
        computed, left_out = self._compute_kv(progress)
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

    def _drop_vanished(self, paths: Sequence[Path], files: Sequence[Path]) -> list[str]:
        """Documents indexed from a folder that was named again and no longer holds them."""
        present = {str(path) for path in files}
        folders = [path for path in paths if path.is_dir()]
        gone = {
            source
            for folder in folders
            for source in self._records.shelf.sources_under(folder)
            if source not in present and not Path(source).exists()
        }
        for source in sorted(gone):
            self._records.remove(source)
        return sorted(gone)

    def _read(self, path: Path, tally: _Tally) -> tuple[Document, list[Chunk]] | None:
        source = str(path)
        listed = self._records.shelf.get(source)
        try:
            if listed is not None and listed.digest == digest_file(path):
                tally.unchanged.append(source)
                return None
            document = read_document(path)
            chunks = self._chunker.split(document)
            if not chunks:
                raise UnreadableDocument(f"{path} holds no text")
        except OSError as error:
            # An earlier version may still be right: it stays.
            tally.skipped.append(SkippedFile(path, str(error)))
            return None
        except DocumentError as error:
            tally.skipped.append(SkippedFile(path, str(error)))
            if listed is not None:  # it changed into something that cannot be read: the earlier text is gone
                self._records.remove(source)
                tally.removed.append(source)
            return None
        (tally.changed if listed is not None else tally.added).append(source)
        return document, chunks

    def _commit(self, waiting: list[tuple[Document, list[Chunk]]], tally: _Tally) -> None:
        """Write vectors, then make the documents visible in one commit that also drops their old versions."""
        everything = [chunk for _, chunks in waiting for chunk in chunks]
        if everything:
            self._bank.add(everything, self._encoder.encode([chunk.text for chunk in everything]))
        with self._records.database.transaction():
            for document, chunks in waiting:
                framed = [self._adapter.template.framed(chunk.token_ids) for chunk in chunks]
                self._records.put(document, chunks, [digest_tokens(ids) for ids in framed])
        tally.chunks += len(everything)

    def _compute_kv(self, progress: Progress) -> tuple[int, int]:
        """Chunk KV of every pending document; returns how many were computed and how many did not fit the limit."""
        shelf, store, pending = self._records.shelf, self._records.store, self._records.pending
        sources = pending.sources()
        listed = {source: shelf.get(source) for source in sources}
        total = sum(document.tokens for document in listed.values() if document is not None)
        done = computed = left_out = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress("computing KV", min(done, total), total)

        for source in sources:
            rows = shelf.chunks(source)
            texts = self._bank.texts([row.row_id for row in rows])
            chunks = [
                self._adapter.template.chunk_ids(texts[row.row_id]) for row in rows if row.row_id in texts
            ]
            fitting = self._fitting(chunks)
            left_out += len(chunks) - len(fitting)
            computed += prepare_chunks(
                self._adapter, store, fitting, self._recipe.prepare, system=self._system, progress=advance
            )
            pending.done(source)
        return computed, left_out

    def _fitting(self, chunks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The chunks that fit under the store's limit: computing more would only evict what was just computed."""
        stats = self._records.store.stats()
        room = stats.limit_bytes - stats.bytes
        fitting = []
        for ids in chunks:
            room -= len(ids) * self._adapter.geometry.token_bytes
            if room < 0:
                break
            fitting.append(ids)
        return fitting
