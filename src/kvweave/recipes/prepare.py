"""Slot 1, prepare: how a chunk's KV is made offline, before any question asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.core import ChunkKV, Making
from kvweave.models.adapter import Adapter
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.keys import digest_tokens


class Prepare(Protocol):
    """Makes position-independent KV of single chunks behind a system prefix (ids)."""

    def making(self, adapter: Adapter, prefix: Sequence[int], chunk_tokens: int) -> Making | None:
        """How `make` would make the KV of a chunk of this length; None when the recipe prepares nothing."""
        ...

    def made_at(self, prefix: Sequence[int]) -> int:
        """The position, in tokens, at which a chunk stands while it is prepared."""
        ...

    def make(
        self, adapter: Adapter, store: ChunkStore, prefix: Sequence[int], chunk: Sequence[int]
    ) -> ChunkKV:
        """Compute a chunk's KV; does not store it."""
        ...


@dataclass(frozen=True, slots=True)
class NotPrepared:
    """Nothing is made offline."""

    def making(self, adapter: Adapter, prefix: Sequence[int], chunk_tokens: int) -> Making | None:
        """None."""
        return None

    def made_at(self, prefix: Sequence[int]) -> int:
        """Never asked for."""
        return 0

    def make(
        self, adapter: Adapter, store: ChunkStore, prefix: Sequence[int], chunk: Sequence[int]
    ) -> ChunkKV:
        """Never called: there is no making."""
        raise AssertionError("a recipe that prepares nothing was asked to prepare")


@dataclass(frozen=True, slots=True)
class Bare:
    """Prefill the chunk alone from position 0: it keeps an attention sink of its own (CacheClip §2.3)."""

    def making(self, adapter: Adapter, prefix: Sequence[int], chunk_tokens: int) -> Making | None:
        """Exact after nothing."""
        return Making("bare", (), rope_regime=adapter.rope_regime(chunk_tokens))

    def made_at(self, prefix: Sequence[int]) -> int:
        """Position 0."""
        return 0

    def make(
        self, adapter: Adapter, store: ChunkStore, prefix: Sequence[int], chunk: Sequence[int]
    ) -> ChunkKV:
        """One pass over the chunk."""
        return adapter.encode(chunk)


@dataclass(frozen=True, slots=True)
class Isolated:
    """Prefill S ++ C and keep C's rows: one sink at the front of the prompt (FusionRAG eq. 5)."""

    def making(self, adapter: Adapter, prefix: Sequence[int], chunk_tokens: int) -> Making | None:
        """Exact after the system prefix alone."""
        context = (digest_tokens(prefix),) if prefix else ()
        return Making("isolated", context, rope_regime=adapter.rope_regime(len(prefix) + chunk_tokens))

    def made_at(self, prefix: Sequence[int]) -> int:
        """Right behind the prefix."""
        return len(prefix)

    def make(
        self, adapter: Adapter, store: ChunkStore, prefix: Sequence[int], chunk: Sequence[int]
    ) -> ChunkKV:
        """One pass over the chunk behind the prefix's stored KV."""
        if not prefix:
            return adapter.encode(chunk)
        if adapter.rope_regime(len(prefix)) == adapter.rope_regime(len(prefix) + len(chunk)):
            return adapter.encode(chunk, prefix_kv(adapter, store, prefix))
        # The prefix alone would run under other frequencies: compute both together and keep the chunk.
        both = adapter.encode((*prefix, *chunk))
        return ChunkKV(tuple(chunk), both.kv[:, :, :, len(prefix) :].contiguous())


def prefix_kv(adapter: Adapter, store: ChunkStore, prefix: Sequence[int]) -> ChunkKV:
    """The system prefix's KV from the store, computed and stored if it is not there."""
    making = Making("bare", (), rope_regime=adapter.rope_regime(len(prefix)))
    found = store.get(adapter.fingerprint, tuple(prefix), making)
    if found is None:
        found = adapter.encode(prefix)
        store.put(adapter.fingerprint, found, making, sources=())
    return found


def prepare_chunks(
    adapter: Adapter,
    store: ChunkStore,
    chunks: Sequence[Sequence[int]],
    prepare: Prepare,
    *,
    system: str | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Make and store what the recipe needs of each chunk and the store lacks.

    `chunks` are token ids as they stand in a prompt (`adapter.template.chunk_ids(text)`); `progress` is
    called with the number of tokens done after each chunk. Returns how many were computed and stored, each
    before the next begins: an interrupted run keeps what it did.
    """
    prefix = adapter.template.prefix_ids(system)
    chunks = list(dict.fromkeys(map(tuple, chunks)))  # a text that is there twice is made once
    makings = [prepare.making(adapter, prefix, len(ids)) for ids in chunks]
    digests = [digest_tokens(ids) for ids in chunks]
    wanted = [(digest, making) for digest, making in zip(digests, makings, strict=True) if making is not None]
    held = iter(store.has_many(adapter.fingerprint, wanted))
    computed = 0
    for ids, digest, making in zip(chunks, digests, makings, strict=True):
        if making is not None and not next(held):
            kv = prepare.make(adapter, store, prefix, ids)
            computed += store.put(adapter.fingerprint, kv, making, sources=(digest,))
        progress(len(ids))
    return computed
