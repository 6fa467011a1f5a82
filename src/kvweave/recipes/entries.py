"""What a pass left about one chunk and is worth storing."""

from dataclasses import dataclass

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.types import ChunkKV, ChunkNote, Making, ModelFingerprint

MOST_PATHS = 16
"""How many KV entries of a chunk requests leave behind as many different texts: each takes as much room as the copy that
may stand anywhere, and those that are asked for again outlive the others."""


@dataclass(frozen=True, slots=True)
class Kept:
    """KV or a note, how it was made, and the digests of the chunks it was made from.

    `most_versions` caps how many entries of this chunk, KV or notes, and of this kind are stored from then on; None does
    not.
    """

    content: ChunkKV | ChunkNote
    making: Making
    sources: tuple[str, ...]
    most_versions: int | None = None

    def put(self, store: ChunkStore, model: ModelFingerprint) -> bool:
        """Store it; whether the store holds it now. Raises as ChunkStore.put does."""
        if isinstance(self.content, ChunkNote):
            return store.put_note(
                model, self.content, self.making, self.sources, most_versions=self.most_versions
            )
        return store.put(model, self.content, self.making, self.sources, most_versions=self.most_versions)
