"""What recipes and requests ask of a store of chunk KV, whatever it keeps its entries in.

`ChunkStore` (files, with a cap and tiers) and `MemoryStore` (one process' memory) satisfy it without inheriting from it.
"""

from collections.abc import Sequence
from typing import Protocol

from kvweave.kvstore.tiers.leases import Lease
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint


class KVStore(Protocol):
    """Chunk KV and chunk features, each found by its model, its chunk's tokens and its provenance.

    Every look-up answers its requests in the order given. `model` is the model that made the entries: entries of other
    models are never found. Callers must not write to tensors that a store returns. `ChunkStore` documents each method.
    """

    def find(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None = None,
    ) -> list[tuple[ChunkKV, KVProvenance] | None]:
        """Return for each (token ids, provenances, best first) the first stored KV with its provenance, or None."""
        ...

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """Return one entry with every layer verified, or None."""
        ...

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Return the feature stored for each (token ids, provenance), or None."""
        ...

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """Return the provenances of all KV stored for each chunk, given by its token ids."""
        ...

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether KV is stored for each (digest of the tokens, provenance)."""
        ...

    def has_features(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether a feature is stored for each (digest of the tokens, provenance)."""
        ...

    def import_entries(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Copy KV from a shared tier, if there is one; return whether each entry is stored here now."""
        ...

    def import_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Copy features from a shared tier, if there is one; return whether each is stored here now."""
        ...

    def put(
        self,
        model: ModelFingerprint,
        kv: ChunkKV,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store a chunk's KV unless its key is there already; return whether the store holds the key now.

        `sources` are the token digests of all chunks that it was computed from. `max_versions` limits how many entries of
        this chunk and `provenance.kind` stay; None sets no limit.
        """
        ...

    def put_feature(
        self,
        model: ModelFingerprint,
        feature: ChunkFeature,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store a chunk's feature; otherwise as `put`."""
        ...

    def lease(self) -> Lease:
        """Return a context manager that keeps entries found through it from being evicted."""
        ...

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Begin to load KV that `find` will be asked for, given the digest of each chunk's tokens."""
        ...

    @property
    def limit_bytes(self) -> int:
        """The cap on the entries' size."""
        ...

    @property
    def used_bytes(self) -> int:
        """The entries' size."""
        ...
