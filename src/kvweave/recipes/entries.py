"""What a pass left about one chunk and is worth storing."""

from dataclasses import dataclass

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint

MOST_PATHS = 16
"""How many KV entries of a chunk requests leave behind as many different texts: each takes as much room as the copy that
may stand anywhere, and those that are asked for again outlive the others."""


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """KV or a note, how it was made, and the digests of the chunks it was made from.

    `max_versions` caps how many entries of this chunk, KV or notes, and of this kind are stored from then on; None does
    not.
    """

    content: ChunkKV | ChunkFeature
    provenance: KVProvenance
    sources: tuple[str, ...]
    max_versions: int | None = None

    def put(self, store: ChunkStore, model: ModelFingerprint) -> bool:
        """Store it; whether the store holds it now. Raises as ChunkStore.put does."""
        if isinstance(self.content, ChunkFeature):
            return store.put_feature(
                model, self.content, self.provenance, self.sources, max_versions=self.max_versions
            )
        return store.put(model, self.content, self.provenance, self.sources, max_versions=self.max_versions)
