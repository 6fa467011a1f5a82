"""What preparing a chunk needs (model, store, system prefix, other chunks), and the entries that it leaves to be stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvweave.kvstore.keys import digest_chunks, digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.engine import Engine
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint, Storage

Ids = tuple[int, ...]
"""A chunk's token ids as they appear in a prompt."""

Vectors = npt.NDArray[np.float32]


class Corpus(Protocol):
    """The chunks that a knowledge base holds, for preparations that depend on other chunks."""

    @property
    def size(self) -> int:
        """The number of different chunks."""

    @property
    def digest(self) -> str:
        """Names the set of chunks; changes when a chunk is added or removed."""

    def similar(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        """Return at most `limit` other chunks, the most similar in meaning first."""

    def previous(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        """Return the last `limit` chunks before this one in its document, in reading order."""


@dataclass(frozen=True, slots=True)
class NoCorpus:
    """A corpus without other chunks."""

    size: ClassVar[int] = 0
    digest: ClassVar[str] = ""

    def similar(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        return ()

    def previous(self, chunk: Ids, limit: int) -> Sequence[Ids]:
        return ()


@dataclass(frozen=True, slots=True)
class PrepareContext:
    """What chunk KV and chunk features are computed with: the model, a store, the ids of the system prefix, the other chunks.

    `progress` is called with the number of tokens done. `storage` is how KV is stored that a preparation or a feature extractor
    stores on the way; the prefix's KV is always stored exactly.
    """

    adapter: Engine
    store: KVStore
    prefix: Ids
    corpus: Corpus = field(default_factory=NoCorpus)
    progress: Callable[[int], None] = lambda tokens: None
    storage: Storage = "exact"

    def prefix_kv(self) -> ChunkKV:
        """Return the system prefix's KV from the store; compute and store it if it is missing."""
        provenance = KVProvenance("bare", (), rope_regime=self.adapter.rope_regime(len(self.prefix)))
        found = self.store.get(self.adapter.fingerprint, self.prefix, provenance)
        if found is None:
            found = self.adapter.encode(self.prefix)
            self.store.put(self.adapter.fingerprint, found, provenance, sources=())
        return found


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """KV or a feature of one chunk that is worth storing, computed from the chunks with the digests `sources`.

    `max_versions` is how many KV entries of this chunk and kind may stay in the store; None sets no limit.
    """

    content: ChunkKV | ChunkFeature
    provenance: KVProvenance
    sources: tuple[str, ...]
    max_versions: int | None = None

    def put(self, store: KVStore, model: ModelFingerprint) -> bool:
        """Store it; return whether the store holds it now. Raises as `ChunkStore.put` does."""
        return store.put(model, self.content, self.provenance, self.sources, max_versions=self.max_versions)


class ChunkList:
    """A corpus of documents given as lists of chunk texts, in reading order; the first of several equal texts counts.

    Args:
        documents: the chunk texts of each document.
        tokenize: returns a text's token ids as they appear in a prompt.
        embed: returns unit vectors (n, width) of texts; called only when similar chunks are asked for.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[str]],
        tokenize: Callable[[str], Sequence[int]],
        embed: Callable[[Sequence[str]], Vectors],
    ) -> None:
        self._texts = [text for chunks in documents for text in chunks]
        ends = accumulate(len(chunks) for chunks in documents)
        self._document_start = [
            end - len(chunks) for end, chunks in zip(ends, documents, strict=True) for _ in chunks
        ]
        self._tokenize, self._embed = tokenize, embed

    @cached_property
    def _ids(self) -> list[Ids]:
        return [tuple(self._tokenize(text)) for text in self._texts]

    @cached_property
    def _place(self) -> dict[Ids, int]:
        return {chunk: number for number, chunk in reversed(list(enumerate(self._ids)))}

    @cached_property
    def _vectors(self) -> Vectors:
        return self._embed(self._texts)

    @property
    def size(self) -> int:
        """The number of different chunks."""
        return len(self._place)

    @cached_property
    def digest(self) -> str:
        """Names the set of chunks, whatever their order."""
        return digest_chunks(map(digest_tokens, self._place))

    def similar(self, chunk: Ids, limit: int) -> list[Ids]:
        """Return other chunks by the cosine of their embeddings (FusionRAG §3.1)."""
        cosines = self._vectors @ self._vectors[self._place[chunk]]
        ranked = (self._ids[number] for number in np.argsort(-cosines, kind="stable"))
        return [ids for ids in dict.fromkeys(ranked) if ids != chunk][:limit]

    def previous(self, chunk: Ids, limit: int) -> list[Ids]:
        """Return the last chunks before it in its document."""
        place = self._place[chunk]
        return self._ids[max(self._document_start[place], place - limit) : place]
