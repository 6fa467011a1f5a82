"""Slot 1, prepare: how a chunk's KV is computed offline, before any question uses it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

from kvweave.errors import InvalidRequest
from kvweave.kvstore.format import storage_of
from kvweave.kvstore.keys import digest_tokens, quantised
from kvweave.models.engine import Engine
from kvweave.ops.quantise import BITS, quantise, quantised_bytes
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import ENTRY_OVERHEAD_BYTES, FeatureExtractor
from kvweave.recipes.request import PrefillRequest
from kvweave.types import ChunkKV, KVProvenance, Storage

ISOLATED: Final = "isolated"
"""The kind of KV that was computed after the system prefix alone."""
_BEST_FIRST: Final[tuple[Storage, ...]] = ("exact", "int8", "int4")


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    """A chunk's KV, the token digests of the chunks that it was computed from, and features found on the way."""

    kv: ChunkKV
    sources: tuple[str, ...]
    features: tuple[StoreEntry, ...] = ()


class Prepare(Protocol):
    """Computes chunk KV that can be used at any position after a system prefix (ids).

    Inherit from it: most preparations share its defaults.
    """

    @abstractmethod
    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return the provenances of KV usable for a chunk of this length, best first; empty if nothing is prepared.

        `compute` makes KV of the first one. The others are used where that is missing.
        """

    @abstractmethod
    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Compute a chunk's KV; do not store it."""

    def candidates(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[KVProvenance, ...]]:
        """Return the provenances of KV usable for each of these spans of a prompt, best first.

        By default the same in every prompt, but for its first chunk: KV that was computed without other chunks comes first there.
        In fewer bits it is in no exact path, and still nearer to full attention's than any other.
        """
        found = []
        for number in spans:
            usable = self.provenances(request.adapter, request.prefix, request.prompt.spans[number].tokens)
            if request.prefix_context is None and not request.chunks_before(number):
                usable = tuple(sorted(usable, key=lambda each: not each.kind.startswith(ISOLATED)))
            found.append(usable)
        return found

    @property
    def plain(self) -> "Prepare":
        """The cheapest preparation whose KV serves in place of this one; by default this preparation itself.

        Where it is another one, `compute` stores its KV too.
        """
        return self

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Features to extract beside those of the selector; by default none."""
        return ()

    @property
    def by_products(self) -> tuple[FeatureExtractor, ...]:
        """Extractors whose features `compute` leaves without a pass of their own; by default none."""
        return ()

    @property
    def entry_count(self) -> int:
        """The most KV entries that preparing a chunk stores; by default one."""
        return 1

    @property
    def storage(self) -> Storage:
        """How prepared KV is stored; by default exactly."""
        return "exact"

    def bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Return at most how many bytes of the store those entries and the features beside them take for a chunk of this length."""
        beside = sum(each.bytes(adapter, chunk_tokens) for each in self.by_products)
        return self.entry_count * kv_bytes(adapter, chunk_tokens, self.storage) + beside

    @property
    def max_versions(self) -> int | None:
        """How many exact versions of a chunk's KV are kept, each with a feature of its attention.

        None: versions are kept without features, within the limit that holds for every recipe (`recipe.py`).
        """
        return None


@dataclass(frozen=True, slots=True)
class NotPrepared(Prepare):
    """Compute nothing offline."""

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        return ()

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Never called, since there is no provenance."""
        raise AssertionError("a recipe that prepares nothing was asked to prepare")


@dataclass(frozen=True, slots=True)
class Bare(Prepare):
    """Prefill the chunk alone from position 0, so that it has its own attention sink (CacheClip §2.3)."""

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return one, exact after no text."""
        return (KVProvenance("bare", (), rope_regime=adapter.rope_regime(chunk_tokens)),)

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Run one pass over the chunk."""
        return PreparedChunk(ctx.adapter.encode(chunk), (digest_tokens(chunk),))


@dataclass(frozen=True, slots=True)
class Isolated(Prepare):
    """Prefill S ++ C and keep C's rows: one attention sink at the front of the prompt (FusionRAG eq. 5)."""

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return one, exact after the system prefix alone."""
        return (isolated_provenance(adapter, prefix, chunk_tokens),)

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Run one pass over the chunk after the prefix's stored KV."""
        adapter, prefix = ctx.adapter, ctx.prefix
        sources = (digest_tokens(chunk),)
        if not prefix:
            return PreparedChunk(adapter.encode(chunk), sources)
        if adapter.rope_regime(len(prefix)) == adapter.rope_regime(len(prefix) + len(chunk)):
            return PreparedChunk(adapter.encode(chunk, ctx.prefix_kv()), sources)
        # The prefix alone would run under other frequencies: compute both together and keep the chunk.
        both = adapter.encode((*prefix, *chunk))
        return PreparedChunk(ChunkKV(chunk, both.kv[:, :, :, len(prefix) :].contiguous()), sources)


def isolated_provenance(adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
    """Return the provenance of a chunk's KV after the system prefix alone."""
    regime = adapter.rope_regime(len(prefix) + chunk_tokens)
    return KVProvenance(ISOLATED, (digest_tokens(prefix),) if prefix else (), rope_regime=regime)


class WithNeighbours(Prepare):
    """Prefill a chunk after other chunks that are likely to come before it in prompts.

    The neighbours' `isolated` KV is placed between system prefix and chunk, so that no chunk has to wait for another.
    Where this KV is missing, for instance because a neighbour was removed, `isolated` KV is used.
    """

    entry_count: ClassVar[int] = (
        2  # the chunk's own KV, and the `isolated` KV that other chunks are prepared after
    )

    @property
    @abstractmethod
    def kind(self) -> str:
        """The provenance kind of this KV."""

    @abstractmethod
    def neighbours(self, ctx: PrepareContext, chunk: Ids) -> list[Ids]:
        """Return the chunks to place before this one, in order: as many as fit the model's context."""

    @property
    def plain(self) -> Prepare:
        return Isolated()

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return this kind, not exact because the neighbours' KV was computed apart, ..., and last `isolated`."""
        isolated = isolated_provenance(adapter, prefix, chunk_tokens)
        return replace(isolated, kind=self.kind, exact=False), isolated

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Run one pass over the chunk after the stored KV of as many neighbours as fit the model's context.

        Also store the chunk's isolated KV. It is exact where the chunk comes first in a prompt, replaces this KV where that
        is missing, and serves to prepare other chunks. Without neighbours it is both.
        """
        neighbours = self.neighbours(ctx, chunk)
        isolated = isolated_kv(ctx, chunk)
        if not neighbours:
            return PreparedChunk(isolated, (digest_tokens(chunk),))
        prepared = encode_after(ctx, neighbours, chunk)
        return replace(prepared, features=self.features_of(ctx, prepared, isolated))

    def features_of(
        self, ctx: PrepareContext, prepared: PreparedChunk, isolated: ChunkKV
    ) -> tuple[StoreEntry, ...]:
        """Return the features of `by_products`, given a chunk's KV after its neighbours and alone; by default none."""
        return ()


@dataclass(frozen=True, slots=True)
class Similar(WithNeighbours):
    """After the `count` chunks most similar to it, the most similar first (FusionRAG §3.1 eq. 10)."""

    count: int = 10

    @property
    def kind(self) -> str:
        return f"similar-{self.count}"

    def neighbours(self, ctx: PrepareContext, chunk: Ids) -> list[Ids]:
        return fitting(ctx, chunk, ctx.corpus.similar(chunk, self.count))


@dataclass(frozen=True, slots=True)
class Previous(WithNeighbours):
    """After the `count` chunks before it in its document, to which its first sentences often refer. In no paper."""

    count: int = 1

    @property
    def kind(self) -> str:
        return f"following-{self.count}"

    def neighbours(self, ctx: PrepareContext, chunk: Ids) -> list[Ids]:
        """Return the previous chunks, in reading order."""
        return fitting(ctx, chunk, ctx.corpus.previous(chunk, self.count))


def fitting(ctx: PrepareContext, chunk: Ids, ranked: Sequence[Ids], beside: Sequence[Ids] = ()) -> list[Ids]:
    """Return the first of these chunks, as many as fit the model's context before a chunk, and beside others."""
    adapter = ctx.adapter
    regime = adapter.rope_regime(len(ctx.prefix) + len(chunk))
    length = len(ctx.prefix) + len(chunk) + sum(map(len, beside))
    taken = []
    for ids in ranked:
        length += len(ids)
        if length > adapter.geometry.context_tokens or adapter.rope_regime(length) != regime:
            break
        taken.append(ids)
    return taken


def encode_after(ctx: PrepareContext, neighbours: Sequence[Ids], chunk: Ids) -> PreparedChunk:
    """Compute a chunk's KV after the isolated KV of others, which must fit the context; store theirs if it is missing."""
    prefix = [ctx.prefix_kv()] if ctx.prefix else []
    before = [isolated_kv(ctx, ids) for ids in neighbours]
    kv = ctx.adapter.encode(chunk, *prefix, *before)
    return PreparedChunk(kv, tuple(digest_tokens(ids) for ids in (chunk, *neighbours)))


def isolated_kv(ctx: PrepareContext, chunk: Ids) -> ChunkKV:
    """Return a chunk's isolated KV from the store; compute and store it, as it is stored, if it is missing."""
    provenance = quantised(isolated_provenance(ctx.adapter, ctx.prefix, len(chunk)), ctx.storage)
    found = ctx.store.get(ctx.adapter.fingerprint, chunk, provenance)
    if found is None:
        isolated = Isolated().compute(ctx, chunk)
        found = quantise_kv(isolated.kv, ctx.storage)
        ctx.store.put(ctx.adapter.fingerprint, found, provenance, isolated.sources)
    return found


def quantise_kv(kv: ChunkKV, storage: Storage) -> ChunkKV:
    """Return KV as it is stored: quantised, or unchanged if the storage is exact or it is quantised so already."""
    if storage in ("exact", storage_of(kv)):
        return kv
    return ChunkKV(kv.token_ids, quantise(kv.kv, storage))


def kv_bytes(adapter: Engine, tokens: int, storage: Storage = "exact") -> int:
    """Return at most how many bytes a KV entry of this length takes."""
    shape = adapter.geometry
    if storage not in BITS:
        return tokens * shape.token_bytes + ENTRY_OVERHEAD_BYTES
    dimensions = (shape.layers, 2, shape.kv_heads, tokens, shape.head_width)
    return quantised_bytes(dimensions, shape.dtype, storage) + ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class _Stored(Prepare):
    """The KV of another preparation in another storage; all else is that of `inner`."""

    inner: Prepare

    @property
    def plain(self) -> Prepare:
        """That of the inner preparation, stored as this one."""
        return replace(self, inner=self.inner.plain)

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors

    @property
    def by_products(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.by_products

    @property
    def entry_count(self) -> int:
        return self.inner.entry_count


@dataclass(frozen=True, slots=True)
class Quantised(_Stored):
    """The KV of another preparation, stored as int8 or int4 and dequantised whenever it is placed in a prompt.

    Quantised KV is never exact: it is used in no exact path, and what a request computes after it is not stored.
    Where it is missing, the same KV stored exactly by another process is used.

    Raises InvalidRequest for a preparation that keeps exact versions.
    """

    coding: Storage

    def __post_init__(self) -> None:
        if self.inner.max_versions is not None:
            raise InvalidRequest(
                f"a preparation that keeps exact versions of chunks cannot be stored as {self.coding}, which is never "
                "exact; use storage exact, or another preparation"
            )

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return each provenance of the inner preparation, quantised and then exact."""
        exact = self.inner.provenances(adapter, prefix, chunk_tokens)
        return tuple(
            each for provenance in exact for each in (quantised(provenance, self.coding), provenance)
        )

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Quantise what the inner preparation computes; `ctx.storage` says how KV is stored on the way."""
        prepared = self.inner.compute(ctx, chunk)
        return replace(prepared, kv=quantise_kv(prepared.kv, self.coding))

    @property
    def storage(self) -> Storage:
        return self.coding


@dataclass(frozen=True, slots=True)
class AnyStorage(_Stored):
    """The KV of another preparation in whatever storage it is there: exact, else in the most bits.

    What it computes itself is exact. `inner` is exact, and keeps no exact versions.
    """

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return each provenance of the inner preparation in every storage."""
        exact = self.inner.provenances(adapter, prefix, chunk_tokens)
        return tuple(quantised(provenance, storage) for provenance in exact for storage in _BEST_FIRST)

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        return self.inner.compute(ctx, chunk)
