"""What chunks are prepared with: the model, the store, the system prefix, and the chunks around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvweave.core import ChunkKV, Making, Storage
from kvweave.models.adapter import Adapter
from kvweave.store.chunk_store import ChunkStore

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
class Workshop:
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
        making = Making("bare", (), rope_regime=self.adapter.rope_regime(len(self.prefix)))
        found = self.store.get(self.adapter.fingerprint, self.prefix, making)
        if found is None:
            found = self.adapter.encode(self.prefix)
            self.store.put(self.adapter.fingerprint, found, making, sources=())
        return found
