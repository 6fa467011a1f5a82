"""The chunks of documents and distractors, their vectors, and the product's own index over them.

Building one embeds some thousand chunks, so that it is kept in a folder under a name that says what is in it.
"""

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvweave.documents.chunking import Chunker
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.index.documents import document_version
from kvweave.index.search import FoundChunk
from kvweave.index.vector_index import VectorIndex
from kvweave.models.prompt import PromptTemplate
from kvweave.recipes.context import ChunkList
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Chunk, Document
from kvweave_lab.eval.natural.distractors import Page, pages_digest
from kvweave_lab.eval.natural.questions import Evidence, QuestionSet
from kvweave_lab.real_models import cache_folder

Vectors = npt.NDArray[np.float32]

OWN: Final = "set/"
"""Begins the source of the set's own documents; a distractor's source begins with `installed/`."""

_INSTALLED: Final = "installed/"
_BATCH: Final = 256


@dataclass(frozen=True)
class Library:
    """Everything that is searched.

    Attributes:
        chunks: those of the documents, then those of the distractors, each document's in reading order.
        vectors: (chunks, dimensions), of length 1.
        index: the product's index, which holds all of them.
        encoder: embeds questions as the chunks were embedded.
        digest: names the content.
    """

    chunks: tuple[Chunk, ...]
    vectors: Vectors
    index: VectorIndex
    encoder: TextEncoder
    digest: str

    @cached_property
    def visible(self) -> frozenset[str]:
        """The versions of all documents, as the index names them."""
        return frozenset(document_version(chunk.document, chunk.document_digest) for chunk in self.chunks)

    @cached_property
    def number_of(self) -> dict[tuple[str, int], int]:
        """The number of each chunk by its document's source and its first character."""
        return {(chunk.document, chunk.start): number for number, chunk in enumerate(self.chunks)}

    @cached_property
    def _by_document(self) -> dict[str, list[int]]:
        numbers = defaultdict(list)
        for number, chunk in enumerate(self.chunks):
            numbers[chunk.document].append(number)
        return numbers

    def search(self, question: str, k: int) -> list[FoundChunk]:
        """Return the k best chunks for a question, as the product finds them."""
        return self.index.search(question, self.encoder.encode([question])[0], k, self.visible)

    def number(self, found: FoundChunk) -> int:
        """Return the number of a found chunk."""
        return self.number_of[found.source, found.start]

    def holder(self, evidence: Evidence) -> int:
        """Return the number of the chunk that holds most of a quote."""

        def shared(number: int) -> int:
            chunk = self.chunks[number]
            return min(chunk.end, evidence.end) - max(chunk.start, evidence.start)

        return max(self._by_document[f"{OWN}{evidence.doc}"], key=shared)

    def is_own(self, number: int) -> bool:
        """Return whether a chunk is of the set's own documents."""
        return self.chunks[number].document.startswith(OWN)

    def nearest(self, number: int, count: int) -> list[int]:
        """Return the `count` other chunks of other text that are nearest to a chunk by vector, the nearest first."""
        cosines = self.vectors @ self.vectors[number]
        ranked = np.argsort(-cosines, kind="stable")[: 2 * count + 2]
        own = self.chunks[number].digest
        return [int(other) for other in ranked if self.chunks[other].digest != own][:count]

    def corpus(self, template: PromptTemplate, least: int | None = None) -> ChunkList:
        """Return the chunks as preparations need them: neighbours by the vectors that retrieval uses.

        With `least`, a smaller corpus: the first documents that together have so many chunks.
        """
        documents: list[list[int]] = []
        for numbers in self._by_document.values():
            if least is not None and sum(map(len, documents)) >= least:
                break
            documents.append(numbers)
        vectors = self.vectors[list(chain(*documents))]
        texts = [[self.chunks[number].text for number in numbers] for numbers in documents]
        return ChunkList(texts, template.chunk_ids, lambda texts: vectors)

    def texts(self, least: int) -> list[str]:
        """Return the chunk texts of that smaller corpus."""
        ends = (numbers[-1] + 1 for numbers in self._by_document.values())
        end = next((end for end in ends if end >= least), len(self.chunks))
        return [chunk.text for chunk in self.chunks[:end]]


def open_library(
    content: QuestionSet,
    pages: Sequence[Page],
    tokenizer: Any,
    chunk_tokens: int,
    encoder: TextEncoder,
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> Library:
    """Cut and index documents and pages, or open what an earlier run indexed.

    Args:
        content: the documents.
        pages: the distractors.
        tokenizer: of the answering model.
        chunk_tokens: the longest chunk.
        encoder: the embedding model.
        folder: where indexes are kept; None is a folder in the user's cache.
        progress: called while chunks are embedded.

    Raises InvalidRequest if the folder cannot be written to.
    """
    chunker = Chunker(tokenizer, chunk_tokens)
    documents = [_document(f"{OWN}{name}", text) for name, text in content.documents.items()]
    documents += [_document(f"{_INSTALLED}{page.name}", page.text) for page in pages]
    chunks = tuple(chunk for document in documents for chunk in chunker.split(document))
    named = [encoder.name, [(chunk.document, chunk.start, chunk.digest) for chunk in chunks]]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(named).encode())
    place = (folder or cache_folder() / "natural") / digest
    try:
        if not place.is_dir():
            _build(place, chunks, encoder, progress)
        vectors = np.load(place / "vectors.npy")
    except OSError as error:
        raise InvalidRequest(
            f"the index cannot be kept in {place} ({error}); name another --index"
        ) from error
    index = VectorIndex(place / "index", vectors.shape[1])
    return Library(chunks, vectors, index, encoder, digest)


def configuration(pages: Sequence[Page], library: Library) -> dict[str, Any]:
    """Return the inputs of the results: the distractors and the chunks of all documents."""
    return {"distractors": len(pages), "distractor pages": pages_digest(pages), "library": library.digest}


def _document(source: str, text: str) -> Document:
    digest = xxhash.xxh3_64_hexdigest(text.encode())
    return Document(source, source.rpartition("/")[2], text, digest)


def _build(place: Path, chunks: Sequence[Chunk], encoder: TextEncoder, progress: Progress) -> None:
    """Embed and index the chunks beside `place`, and move the result there whole; another process may be faster."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        parts = []
        for start in range(0, len(chunks), _BATCH):
            parts.append(encoder.encode([chunk.text for chunk in chunks[start : start + _BATCH]]))
            progress("chunks", min(start + _BATCH, len(chunks)), len(chunks))
        vectors = np.concatenate(parts)
        np.save(temporary / "vectors.npy", vectors)
        index = VectorIndex(temporary / "index", vectors.shape[1])
        index.add(chunks, vectors)
        index.sweep({document_version(chunk.document, chunk.document_digest) for chunk in chunks})
        with suppress(OSError):  # there now: another process built the same
            os.rename(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
