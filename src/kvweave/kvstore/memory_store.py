"""A `KVStore` in memory, for callers that prepare entries, use them a few times and discard them all.

Recipes get the same entries from it as from a ChunkStore, to the bit, without files, catalogue or cap. Knows nothing of
documents and limits.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvweave.kvstore.keys import ContentKind, EntryKey, digest_tokens
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint


class MemoryStore:
    """Chunk KV and features in this process's memory; a context manager. See `KVStore` for its methods.

    Nothing is copied or counted, and callers must not write to entries. All versions of a chunk count as equally unused: the
    newest is listed first, and the oldest is dropped first.

    Args:
        base: a store whose entries are here from the beginning; it does not see later ones.
    """

    namespace = "evaluation"

    def __init__(self, base: "MemoryStore | None" = None) -> None:
        self._kv: dict[str, tuple[EntryKey, ChunkKV]] = dict(base._kv) if base else {}  # oldest first
        self._features: dict[str, ChunkFeature] = dict(base._features) if base else {}

    # Looking up

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """Return one entry, or None."""
        found = self._first(model, digest_tokens(token_ids), [provenance])
        return None if found is None else found[0]

    def find(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None = None,
    ) -> list[tuple[ChunkKV, KVProvenance] | None]:
        """Return for each span the KV of the first provenance that is here, with that very provenance; or None."""
        return [self._first(model, digest_tokens(ids), provenances) for ids, provenances in wanted]

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Return each feature, or None."""
        keys = [self._key(model, digest_tokens(ids), provenance, "note") for ids, provenance in wanted]
        return [self._features.get(key.digest) for key in keys]

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether each entry of KV is here, given the digest of its tokens and its provenance."""
        return [self._key(model, tokens, provenance).digest in self._kv for tokens, provenance in wanted]

    def has_features(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether each feature is here; as `has_many`."""
        keys = [self._key(model, tokens, provenance, "note") for tokens, provenance in wanted]
        return [key.digest in self._features for key in keys]

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """Return the provenances of all KV of each chunk, the newest first."""
        names = [(model.digest, digest_tokens(ids)) for ids in chunks]
        keys = [key for key, _ in reversed(self._kv.values())]
        return [[key.provenance for key in keys if (key.model, key.tokens) == name] for name in names]

    def import_entries(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Return whether each entry is here: there is no other tier to import from."""
        return self.has_many(model, [(digest_tokens(ids), provenance) for ids, provenance in wanted])

    def import_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Return whether each feature is here; as `import_entries`."""
        return self.has_features(model, [(digest_tokens(ids), provenance) for ids, provenance in wanted])

    def lease(self) -> Lease:
        """Return a lease of nothing: entries here are never evicted, and never have to be loaded."""
        return Lease(Pins())

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Do nothing: everything is in memory."""

    # Storing

    def put(
        self,
        model: ModelFingerprint,
        kv: ChunkKV,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store an entry, unless there is one of this key; always True. `max_versions` as in ChunkStore."""
        key = self._key(model, digest_tokens(kv.token_ids), provenance)
        if key.digest not in self._kv:
            self._kv[key.digest] = key, kv
            alike = [digest for digest, (other, _) in self._kv.items() if _are_versions(key, other)]
            for surplus in alike[:-max_versions] if max_versions is not None else ():
                del self._kv[surplus]
        return True

    def put_feature(
        self,
        model: ModelFingerprint,
        feature: ChunkFeature,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store a feature, unless there is one of this key; always True. Features are small: all versions stay."""
        key = self._key(model, digest_tokens(feature.token_ids), provenance, "note")
        self._features.setdefault(key.digest, feature)
        return True

    limit_bytes = sys.maxsize
    """There is no cap."""

    @property
    def used_bytes(self) -> int:
        """What the entries' KV takes in memory; features are small, and not counted."""
        return sum(kv.bytes for _, kv in self._kv.values())

    def close(self) -> None:
        """Drop everything."""
        self._kv.clear()
        self._features.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _key(
        self, model: ModelFingerprint, tokens: str, provenance: KVProvenance, content: ContentKind = "kv"
    ) -> EntryKey:
        return EntryKey(self.namespace, model.digest, tokens, provenance, content)

    def _first(
        self, model: ModelFingerprint, tokens: str, provenances: Sequence[KVProvenance]
    ) -> tuple[ChunkKV, KVProvenance] | None:
        for provenance in provenances:
            digest = self._key(model, tokens, provenance).digest
            found = self._kv.get(digest)
            if found is not None:
                return replace(found[1], entry=f"{id(self)}:{digest}"), provenance
        return None


def _are_versions(key: EntryKey, other: EntryKey) -> bool:
    """Return whether `max_versions` counts two entries together."""
    return (key.model, key.tokens, key.provenance.kind) == (other.model, other.tokens, other.provenance.kind)
