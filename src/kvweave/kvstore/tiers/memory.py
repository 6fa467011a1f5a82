"""Entries kept in memory, of the host or of a device, under a hard cap: the least worth keeping goes first.

One that a running request uses is never let go of, and a newcomer gets in only where it is clearly worth more than each of
those that would have to go. Knows nothing about files, servers or what the entries hold.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvweave.kvstore.eviction import EvictionRow, after_retrievals, choose_victims
from kvweave.kvstore.format import Content, ParsedEntry, parse_entry, verify_content
from kvweave.kvstore.tiers.tier import Blob, owned_copy
from kvweave.types import ChunkKV

Held = TypeVar("Held")

MARGIN = 0.25
"""A newcomer's standing must be higher by this, a score higher by a fifth: copying costs, and of many entries that are asked
for in turn, equally often, some had better stay."""


@dataclass(slots=True)
class MemoryEntry(Generic[Held]):
    """One entry with its size and its standing (`store/eviction.py`)."""

    held: Held
    bytes: int
    standing: float


class Residents(Generic[Held]):
    """What is held, by key; safe to use from several threads.

    Args:
        limit_bytes: the cap, of the sizes that are given.
        in_use: the keys of what may not go.
    """

    def __init__(self, limit_bytes: int, in_use: Callable[[], Collection[str]]) -> None:
        self._limit_bytes = limit_bytes
        self._in_use = in_use
        self._residents: dict[str, MemoryEntry[Held]] = {}
        self._bytes = 0
        self._guard = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """The cap."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """The size of all that is held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._residents)

    def get(self, key: str) -> Held | None:
        """What is held under this key, or None."""
        with self._guard:
            resident = self._residents.get(key)
            return None if resident is None else resident.held

    def asked(self, key: str, tokens: int, now_s: float) -> None:
        """Count a retrieval of an entry of so many tokens; nothing if it is not here."""
        with self._guard:
            resident = self._residents.get(key)
            if resident is not None:
                resident.standing = after_retrievals(resident.standing, 1, tokens, resident.bytes, now_s)

    def admits(self, key: str, size_bytes: int, standing: float) -> bool:
        """Whether `admit` would hold it, as things are now."""
        with self._guard:
            return key not in self._residents and self._victims(size_bytes, standing) is not None

    def admit(
        self, key: str, held: Held, size_bytes: int, standing: float
    ) -> dict[str, MemoryEntry[Held]] | None:
        """Hold an entry, in place of any earlier one of this key.

        Returns:
            What had to go for it, by key; None if it was not let in.
        """
        with self._guard:
            earlier = self._pop(key)
            victims = self._victims(size_bytes, standing)
            if victims is None:
                if earlier is not None:
                    self._add(key, earlier)
                return None
            gone = self._pop_all(victims)
            self._add(key, MemoryEntry(held, size_bytes, standing))
        return gone

    def drop(self, keys: Iterable[str]) -> None:
        """Let go of these, used or not: they do not count any more. Tensors already handed out stay valid."""
        with self._guard:
            for key in keys:
                self._pop(key)

    def set_limit(self, limit_bytes: int) -> dict[str, MemoryEntry[Held]]:
        """Change the cap; returns what had to go. What running requests use stays until others need the room."""
        with self._guard:
            self._limit_bytes = limit_bytes
            return self._pop_all(choose_victims(self._rows(), self._bytes - limit_bytes))

    def sizes(self) -> dict[str, int]:
        """The size of everything that is held."""
        with self._guard:
            return {key: resident.bytes for key, resident in self._residents.items()}

    def _victims(self, size_bytes: int, standing: float) -> list[EvictionRow] | None:
        """Who would have to go for an entry; None if that is not possible, or not worth it."""
        excess = self._bytes + size_bytes - self._limit_bytes
        victims = choose_victims(self._rows(), excess) if excess > 0 else []
        if sum(victim.bytes for victim in victims) < excess:
            return None
        return victims if all(victim.standing + MARGIN < standing for victim in victims) else None

    def _rows(self) -> list[EvictionRow]:
        in_use = self._in_use()
        return [
            EvictionRow(key, resident.bytes, resident.standing)
            for key, resident in self._residents.items()
            if key not in in_use
        ]

    def _add(self, key: str, resident: MemoryEntry[Held]) -> None:
        self._residents[key] = resident
        self._bytes += resident.bytes

    def _pop_all(self, victims: Iterable[EvictionRow]) -> dict[str, MemoryEntry[Held]]:
        popped = {victim.key: self._pop(victim.key) for victim in victims}
        return {key: resident for key, resident in popped.items() if resident is not None}

    def _pop(self, key: str) -> MemoryEntry[Held] | None:
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._bytes -= resident.bytes
        return resident


class DeviceTier:
    """KV on `device`, as `Residents` decides.

    Args:
        device: where the model is.
        limit_bytes: the cap, of the tensors' sizes.
        in_use: the keys of what may not go.
    """

    def __init__(
        self, device: torch.device, limit_bytes: int, in_use: Callable[[], Collection[str]] = tuple
    ) -> None:
        self.device = device
        self.residents: Residents[ChunkKV] = Residents(limit_bytes, in_use)

    def content(self, key: str) -> ChunkKV | None:
        """The KV if it is here; nobody writes to it."""
        return self.residents.get(key)

    def admit(self, key: str, kv: ChunkKV, standing: float) -> bool:
        """Hold a copy on the device if it is worth it; whether it is held now. Raises DamagedEntry as `kv.kv` does."""
        numbers = torch.Size(kv.held.shape).numel()
        if kv.queries is not None:
            numbers += torch.Size(kv.queries.shape).numel()
        size_bytes = numbers * kv.held.dtype.itemsize
        if not self.residents.admits(key, size_bytes, standing):
            return False
        queries = kv.queries if isinstance(kv.queries, Tensor | None) else kv.queries.whole()
        there = None if queries is None else queries.to(self.device, copy=True)
        held = ChunkKV(kv.token_ids, kv.kv.to(self.device, copy=True), there)
        return self.residents.admit(key, held, size_bytes, standing) is not None


@dataclass(frozen=True, slots=True)
class HostEntry:
    """An entry's bytes (n,) uint8, and what is in them; views of the bytes.

    `only_shared`: it came from the shared tier, and the disk had no room for it.
    """

    data: Tensor
    stored: ParsedEntry
    only_shared: bool = False


class HostTier:
    """Verified copies of entries, as `Residents` decides.

    Args:
        limit_bytes: the cap, of the entries' sizes.
        in_use: the keys of what may not go.
    """

    def __init__(self, limit_bytes: int, in_use: Callable[[], Collection[str]] = tuple) -> None:
        self.residents: Residents[HostEntry] = Residents(limit_bytes, in_use)
        self.page_locked = False
        """Whether new copies are made in memory that a device can read by itself; set when there is such a device."""

    def content(self, key: str) -> Content | None:
        """The verified content of an entry that is here, or None."""
        entry = self.residents.get(key)
        return None if entry is None else entry.stored.content

    def admit(self, key: str, data: Blob, standing: float) -> dict[str, MemoryEntry[HostEntry]]:
        """Hold a verified copy of an entry if it is worth it; returns what had to go, none if it is not.

        Raises:
            DamagedEntry: the bytes are no whole entry.
            StoreTooNew: they are one of a newer format version.
        """
        if not self.residents.admits(key, len(data), standing):
            return {}
        copy = owned_copy(data, self.page_locked)
        stored = parse_entry(copy, f"entry {key} in memory")
        verify_content(stored.content)
        return self.residents.admit(key, HostEntry(copy, stored), len(data), standing) or {}
