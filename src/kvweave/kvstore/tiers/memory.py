"""Entries held in memory, of the host or of a device, under a hard cap; the ones with the lowest scores are evicted first.

An entry that a running request uses is never evicted. A new entry is admitted only if its score is clearly higher than that of
each entry that would have to go for it. Knows nothing about files or servers.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvweave.kvstore.eviction import EvictionRow, after_retrievals, choose_victims
from kvweave.kvstore.format import Content, ParsedEntry, parse_entry, verify_content
from kvweave.kvstore.header import as_bytes
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.tiers.tier import ListedEntry, owned_copy
from kvweave.types import ChunkKV

Held = TypeVar("Held")

MARGIN = 0.25
"""How much higher a new entry's score must be: its value is higher by a fifth. Copying costs something, and if many entries are
retrieved equally often, some of them should stay."""


@dataclass(slots=True)
class MemoryEntry(Generic[Held]):
    """What a tier holds of one entry, its size and its eviction score."""

    held: Held
    bytes: int
    score: float


class MemoryTier(Generic[Held]):
    """Entries by key; what is held of each is up to the subclass. Safe to use from several threads.

    A cap of 0 turns the tier off. `in_use` returns the keys that must not be evicted. `on_evict` is called with the entries that
    were evicted, by key.
    """

    name: TierName

    def __init__(
        self,
        limit_bytes: int,
        in_use: Callable[[], Collection[str]] = tuple,
        on_evict: Callable[[Mapping[str, MemoryEntry[Held]]], object] = lambda evicted: None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._on_evict = on_evict
        self._in_use = in_use
        self._entries: dict[str, MemoryEntry[Held]] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def sizes(self) -> dict[str, int]:
        with self._guard:
            return {key: entry.bytes for key, entry in self._entries.items()}

    def peek(self, key: str) -> Held | None:
        with self._guard:
            entry = self._entries.get(key)
            return None if entry is None else entry.held

    def record_hit(self, key: str, tokens: int, now_s: float) -> None:
        """Raise the score of an entry of this many tokens by one retrieval, if it is here."""
        with self._guard:
            entry = self._entries.get(key)
            if entry is not None:
                entry.score = after_retrievals(entry.score, 1, tokens, entry.bytes, now_s)

    def would_hold(self, key: str, size_bytes: int, score: float) -> bool:
        """Return whether the entry is not here yet, and `hold` would accept it now."""
        with self._guard:
            return key not in self._entries and self._victims(size_bytes, score) is not None

    def hold(self, key: str, held: Held, size_bytes: int, score: float) -> bool:
        """Hold an entry, replacing any earlier one of this key; return whether it was accepted."""
        with self._guard:
            earlier = self._pop(key)
            victims = self._victims(size_bytes, score)
            if victims is None:
                if earlier is not None:
                    self._add(key, earlier)
                return False
            evicted = self._pop_all(victims)
            self._add(key, MemoryEntry(held, size_bytes, score))
        self._report(evicted)
        return True

    def drop(self, keys: Iterable[str]) -> None:
        """Drop these entries, used or not, without calling `on_evict`. Tensors handed out before stay valid."""
        with self._guard:
            for key in keys:
                self._pop(key)

    def clear(self) -> int:
        """Drop every entry, as `drop` does; return how many."""
        keys = self.sizes()
        self.drop(keys)
        return len(keys)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the cap and evict down to it; entries that running requests use stay until others need the room."""
        with self._guard:
            self.limit_bytes = limit_bytes
            evicted = self._pop_all(choose_victims(self._rows(), self.used_bytes - limit_bytes))
        self._report(evicted)

    def _victims(self, size_bytes: int, score: float) -> list[EvictionRow] | None:
        """Return the entries that would have to go for a new one; None if that is impossible, or not worth it."""
        excess = self.used_bytes + size_bytes - self.limit_bytes
        victims = choose_victims(self._rows(), excess) if excess > 0 else []
        if sum(victim.bytes for victim in victims) < excess:
            return None
        return victims if all(victim.score + MARGIN < score for victim in victims) else None

    def _rows(self) -> list[EvictionRow]:
        in_use = self._in_use()
        return [
            EvictionRow(key, entry.bytes, entry.score)
            for key, entry in self._entries.items()
            if key not in in_use
        ]

    def _report(self, evicted: Mapping[str, MemoryEntry[Held]]) -> None:
        if evicted:
            self._on_evict(evicted)

    def _add(self, key: str, entry: MemoryEntry[Held]) -> None:
        self._entries[key] = entry
        self.used_bytes += entry.bytes

    def _pop_all(self, victims: Iterable[EvictionRow]) -> dict[str, MemoryEntry[Held]]:
        popped = {victim.key: self._pop(victim.key) for victim in victims}
        return {key: entry for key, entry in popped.items() if entry is not None}

    def _pop(self, key: str) -> MemoryEntry[Held] | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.bytes
        return entry


@dataclass(frozen=True, slots=True)
class HostEntry:
    """A verified entry in this process's memory; `only_shared`: the disk does not have it, the shared tier does."""

    parsed: ParsedEntry
    only_shared: bool = False


class HostTier(MemoryTier[HostEntry]):
    """Verified copies of entries in this process's memory; sizes are those of the entry files."""

    name: TierName = "host"

    page_locked = False
    """Whether new copies are page-locked, so that a device can read them; set when there is a device."""

    def get(self, entry: ListedEntry) -> Content | None:
        held = self.peek(entry.key.digest)
        return None if held is None else held.parsed.content

    def admit(self, entry: ParsedEntry, score: float) -> bool:
        """Hold a verified copy of an entry, if its score is high enough; return whether it was accepted.

        Raises:
            DamagedEntry: its bytes are no whole entry.
        """
        key = entry.key.digest
        if not self.would_hold(key, entry.bytes, score):
            return False
        copy = owned_copy(as_bytes(entry.data), self.page_locked)
        parsed = parse_entry(copy, f"entry {key} in memory")
        verify_content(parsed.content)
        return self.hold(key, HostEntry(parsed), entry.bytes, score)


class DeviceTier(MemoryTier[ChunkKV]):
    """Copies of KV on `device`, where the model is; sizes are those of the tensors."""

    name: TierName = "device"

    def __init__(
        self, device: torch.device, limit_bytes: int, in_use: Callable[[], Collection[str]] = tuple
    ) -> None:
        super().__init__(limit_bytes, in_use)
        self.device = device

    def get(self, entry: ListedEntry) -> Content | None:
        """Return the KV on the device, or None; callers must not write to it."""
        return self.peek(entry.key.digest)

    def admit(self, entry: ParsedEntry, score: float) -> bool:
        """Copy an entry's KV to the device, if its score is high enough; return whether it was accepted.

        Raises:
            DamagedEntry: as `ChunkKV.kv` does.
        """
        key, kv = entry.key.digest, entry.content
        if not isinstance(kv, ChunkKV):
            return False
        size_bytes = torch.Size(kv.data.shape).numel() * kv.data.dtype.itemsize
        if not self.would_hold(key, size_bytes, score):
            return False
        held = ChunkKV(kv.token_ids, kv.kv.to(self.device, copy=True))
        return self.hold(key, held, size_bytes, score)
