"""Chunk KV and notes of one prompt, held in memory: an evaluation prepares them, uses them a few times and lets go.

Gives recipes what a ChunkStore on disk gives them, to the bit, without files, catalogue or cap. Knows neither
documents nor limits: what only the engine asks of a store is not here.
"""

from collections.abc import Sequence

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint


class MemoryStore(ChunkStore):
    """What preparing and prefilling ask of a store: KV and notes are put and found, versions of KV listed.

    Nothing is copied or counted: of a chunk's versions, all of them as unused as the others, the newest comes first and
    the oldest is dropped. Entries are handed out as they were put in, and nobody writes to them.

    Args:
        also: a store whose entries are here from the beginning; it does not see what comes later.
    """

    def __init__(self, also: "MemoryStore | None" = None) -> None:
        # On purpose without the base's: it makes a folder and a catalogue.
        self.namespace = "evaluation"
        self._held: dict[str, tuple[EntryKey, ChunkKV]] = dict(also._held) if also else {}  # oldest first
        self._notes: dict[str, ChunkFeature] = dict(also._notes) if also else {}

    def lease(self) -> Lease:
        """Holds nothing: nothing here is evicted, and nothing has to be loaded."""
        return Lease(Pins())

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Nothing: it is all here."""

    def import_entries(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """What is here: there is no other tier."""
        return self.has_many(model, [(digest_tokens(ids), provenance) for ids, provenance in wanted])

    def import_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """The same of notes."""
        return self.has_features(model, [(digest_tokens(ids), provenance) for ids, provenance in wanted])

    def find(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None = None,
    ) -> list[tuple[ChunkKV, KVProvenance] | None]:
        """For each span the KV of the first making that is here, with that very making; or None."""
        return [self._first(model, digest_tokens(ids), provenances) for ids, provenances in wanted]

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """One entry, if it is here."""
        found = self._first(model, digest_tokens(token_ids), [provenance])
        return None if found is None else found[0]

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Each note that is here, or None."""
        keys = [self._key(model, digest_tokens(ids), provenance, "note") for ids, provenance in wanted]
        return [self._notes.get(key.digest) for key in keys]

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Whether each entry is here, given the digest of its tokens and how it was made."""
        return [self._key(model, tokens, provenance).digest in self._held for tokens, provenance in wanted]

    def has_features(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """The same of notes."""
        return [
            self._key(model, tokens, provenance, "note").digest in self._notes
            for tokens, provenance in wanted
        ]

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """The makings of all KV of each chunk, the newest first."""
        named = [(model.digest, digest_tokens(ids)) for ids in chunks]
        kept = [key for key, _ in reversed(self._held.values())]
        return [[key.provenance for key in kept if (key.model, key.tokens) == name] for name in named]

    def put(
        self,
        model: ModelFingerprint,
        kv: ChunkKV,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Hold an entry, unless there is one of this key; always True. `max_versions` as in ChunkStore."""
        key = self._key(model, digest_tokens(kv.token_ids), provenance)
        if key.digest not in self._held:
            self._held[key.digest] = key, kv
            alike = [name for name, (other, _) in self._held.items() if _same_kind(key, other)]
            for surplus in alike[:-max_versions] if max_versions is not None else ():
                del self._held[surplus]
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
        """Hold a note, unless there is one of this key; always True. Notes are small: all versions stay."""
        key = self._key(model, digest_tokens(feature.token_ids), provenance, "note")
        self._notes.setdefault(key.digest, feature)
        return True

    @property
    def used_bytes(self) -> int:
        """What the entries' KV takes in memory; notes are small, and not counted."""
        return sum(kv.bytes for _, kv in self._held.values())

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()
        self._notes.clear()

    def _first(
        self, model: ModelFingerprint, tokens: str, provenances: Sequence[KVProvenance]
    ) -> tuple[ChunkKV, KVProvenance] | None:
        for provenance in provenances:
            found = self._held.get(self._key(model, tokens, provenance).digest)
            if found is not None:
                return found[1], provenance
        return None


def _same_kind(key: EntryKey, other: EntryKey) -> bool:
    """Whether two entries are versions that `max_versions` counts together."""
    return (key.model, key.tokens, key.provenance.kind) == (other.model, other.tokens, other.provenance.kind)
