"""What chunks are prepared with: the model, the store, the system prefix, and the chunks around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_chunks, digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.types import ChunkKV, KVProvenance, Storage

Ids = tuple[int, ...]
"""A chunk's token ids as they stand in a prompt."""


class Corpus(Protocol):
    """The chunks among which one is prepared, as far as preparing it depends on others."""

    @property
    def size(self) -> int:
        """How many different chunks there are."""
        ...

    @property
    def digest(self) -> str:
        """Names the chunks that there are: another one as soon as any joins or goes."""
        ...

    def similar(self, chunk: Ids, most: int) -> Sequence[Ids]:
        """Other chunks by similarity of meaning, most similar first, at most so many."""
        ...

    def before(self, chunk: Ids, most: int) -> Sequence[Ids]:
        """The chunks that stand right before it in its document, in reading order, at most so many."""
        ...


@dataclass(frozen=True, slots=True)
class NoCorpus:
    """Every chunk is the only one."""

    size: ClassVar[int] = 0
    digest: ClassVar[str] = ""

    def similar(self, chunk: Ids, most: int) -> Sequence[Ids]:
        """None."""
        return ()

    def before(self, chunk: Ids, most: int) -> Sequence[Ids]:
        """None."""
        return ()


@dataclass(frozen=True, slots=True)
class PrepareContext:
    """Where chunk KV is made.

    Attributes:
        adapter: the model.
        store: where what is made goes.
        prefix: token ids of the system prefix that prompts will have.
        corpus: the chunks around.
        progress: called with the number of tokens done.
        storage: how KV is stored that a preparation or a record takes and stores on the way; the prefix's is always exact.
    """

    adapter: Adapter
    store: ChunkStore
    prefix: Ids
    corpus: Corpus = field(default_factory=NoCorpus)
    progress: Callable[[int], None] = lambda tokens: None
    storage: Storage = "exact"

    def prefix_kv(self) -> ChunkKV:
        """The system prefix's KV from the store, computed and stored if it is not there."""
        provenance = KVProvenance("bare", (), rope_regime=self.adapter.rope_regime(len(self.prefix)))
        found = self.store.get(self.adapter.fingerprint, self.prefix, provenance)
        if found is None:
            found = self.adapter.encode(self.prefix)
            self.store.put(self.adapter.fingerprint, found, provenance, sources=())
        return found


Vectors = npt.NDArray[np.float32]


class ChunkList:
    """A corpus of documents whose chunks stand in reading order; of a text that is there twice, the first counts.

    Args:
        documents: the texts of each one's chunks.
        ids: from a text to its token ids as they stand in a prompt.
        encode: texts to unit vectors (n, width); only asked for when likeness is.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[str]],
        ids: Callable[[str], Sequence[int]],
        encode: Callable[[Sequence[str]], Vectors],
    ) -> None:
        self._texts = [text for chunks in documents for text in chunks]
        self._first = [
            end - len(chunks) for end, chunks in zip(_ends(documents), documents, strict=True) for _ in chunks
        ]
        self._read, self._encode = ids, encode

    @cached_property
    def _ids(self) -> list[Ids]:
        return [tuple(self._read(text)) for text in self._texts]

    @cached_property
    def _place(self) -> dict[Ids, int]:
        return {chunk: number for number, chunk in reversed(list(enumerate(self._ids)))}

    @cached_property
    def _vectors(self) -> Vectors:
        return self._encode(self._texts)

    @property
    def size(self) -> int:
        """How many different chunks there are."""
        return len(self._place)

    @cached_property
    def digest(self) -> str:
        """Of the chunks, in whatever order they stand."""
        return digest_chunks(map(digest_tokens, self._place))

    def similar(self, chunk: Ids, most: int) -> list[Ids]:
        """By cosine of embeddings; equals of the chunk itself left out (FusionRAG §3.1)."""
        cosines = self._vectors @ self._vectors[self._place[chunk]]
        ranked = (self._ids[number] for number in np.argsort(-cosines, kind="stable"))
        return [ids for ids in dict.fromkeys(ranked) if ids != chunk][:most]

    def before(self, chunk: Ids, most: int) -> list[Ids]:
        """The last of those before it in its document."""
        place = self._place[chunk]
        return self._ids[max(self._first[place], place - most) : place]


def _ends(documents: Sequence[Sequence[str]]) -> list[int]:
    """Where each document's chunks end among all of them."""
    return list(accumulate(len(chunks) for chunks in documents))
