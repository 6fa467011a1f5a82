"""What a pass left about one chunk and is worth storing."""

from dataclasses import dataclass

from kvweave.core import ChunkKV, ChunkNote, Making, ModelFingerprint
from kvweave.store.chunk_store import ChunkStore


@dataclass(frozen=True, slots=True)
class Kept:
    """KV or a note, how it was made, and the digests of the chunks it was made from.

    `most_versions` caps how many KV entries of this chunk and kind are stored from then on; None does not.
    """

    content: ChunkKV | ChunkNote
    making: Making
    sources: tuple[str, ...]
    most_versions: int | None = None

    def put(self, store: ChunkStore, model: ModelFingerprint) -> bool:
        """Store it; whether the store holds it now. Raises as ChunkStore.put does."""
        if isinstance(self.content, ChunkNote):
            return store.put_note(model, self.content, self.making, self.sources)
        return store.put(model, self.content, self.making, self.sources, most_versions=self.most_versions)
