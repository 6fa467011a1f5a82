"""Chunk KV of one prompt, held in memory: an evaluation prepares it, uses it a few times and lets go of it.

Gives recipes what a ChunkStore on disk gives them, to the bit, without files, catalogue or cap. Knows neither
documents nor limits: what only the engine asks of a store is not here.
"""

from collections.abc import Sequence

from kvweave.core import ChunkKV, Making, ModelFingerprint
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.keys import EntryKey, digest_tokens


class MemoryStore(ChunkStore):
    """What preparing and prefilling ask of a store: `get`, `find`, `has_many` and `put`.

    Nothing is copied, counted or evicted. Entries are handed out as they were put in, and nobody writes to them.

    Args:
        also: a store whose entries are here from the beginning; it does not see what comes later.
    """

    def __init__(self, also: "MemoryStore | None" = None) -> None:
        # On purpose without the base's: it makes a folder and a catalogue.
        self.namespace = "evaluation"
        self._held: dict[str, ChunkKV] = dict(also._held) if also else {}

    def find(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], Sequence[Making]]]
    ) -> list[tuple[ChunkKV, Making] | None]:
        """For each span the KV of the first making that is here, with that very making; or None."""
        return [self._first(model, digest_tokens(ids), makings) for ids, makings in wanted]

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, Making]]) -> list[bool]:
        """Whether each entry is here, given the digest of its tokens and how it was made."""
        return [self._name(model, tokens, making) in self._held for tokens, making in wanted]

    def put(self, model: ModelFingerprint, kv: ChunkKV, making: Making, sources: Sequence[str]) -> bool:
        """Hold an entry, unless there is one of this key; always True."""
        self._held.setdefault(self._name(model, digest_tokens(kv.token_ids), making), kv)
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()

    def _first(
        self, model: ModelFingerprint, tokens: str, makings: Sequence[Making]
    ) -> tuple[ChunkKV, Making] | None:
        for making in makings:
            kv = self._held.get(self._name(model, tokens, making))
            if kv is not None:
                return kv, making
        return None

    def _name(self, model: ModelFingerprint, tokens: str, making: Making) -> str:
        return EntryKey(self.namespace, model.digest, tokens, making).digest
