"""A `KVStore` in memory, for callers that prepare entries, use them a few times and discard them all.

Recipes get the same entries from it as from a ChunkStore, to the bit, without files, catalogue or cap. Knows nothing of
documents and limits.
"""

import sys
from collections.abc import Collection, Mapping, Sequence

from kvweave.kvstore.format import Content
from kvweave.kvstore.keys import EntryKey, LookUp
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.types import KVProvenance


class MemoryStore(KVStore):
    """Chunk KV and features in this process's memory.

    Nothing is copied or counted, entries are never evicted, and all versions of a feature stay. All versions of a chunk count
    as equally unused: the newest is listed first, and the oldest is dropped first.

    Args:
        base: a store whose entries are here from the beginning; it does not see later ones.
    """

    namespace = "evaluation"
    limit_bytes = sys.maxsize

    def __init__(self, base: "MemoryStore | None" = None) -> None:
        self._entries: dict[str, tuple[EntryKey, Content]] = (
            dict(base._entries) if base else {}
        )  # oldest first
        self._location = id(self)

    @property
    def used_bytes(self) -> int:
        """What the entries' KV takes in memory; features are small, and not counted."""
        return sum(content.bytes for key, content in self._entries.values() if key.content == "kv")

    def close(self) -> None:
        self._entries.clear()

    def _find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[tuple[EntryKey, Content] | None]:
        return [
            next(
                (
                    (key, self._entries[key.digest][1])
                    for key in each.candidates
                    if key.digest in self._entries
                ),
                None,
            )
            for each in look_ups
        ]

    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        return self._entries.keys() & set(keys)

    def _versions(self, model: str, chunks: Sequence[str]) -> Mapping[str, list[KVProvenance]]:
        found: dict[str, list[KVProvenance]] = {chunk: [] for chunk in chunks}
        for key, _ in reversed(self._entries.values()):
            if (key.model, key.content) == (model, "kv") and key.tokens in found:
                found[key.tokens].append(key.provenance)
        return found

    def _put(
        self,
        key: EntryKey,
        model_name: str,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        self._entries[key.digest] = key, content
        if max_versions is not None and key.content == "kv":
            alike = [digest for digest, (other, _) in self._entries.items() if _are_versions(key, other)]
            for surplus in alike[:-max_versions]:
                del self._entries[surplus]
        return True


def _are_versions(key: EntryKey, other: EntryKey) -> bool:
    """Return whether `max_versions` counts two entries together."""
    parts = ((each.model, each.tokens, each.content, each.provenance.kind) for each in (key, other))
    return len(set(parts)) == 1
