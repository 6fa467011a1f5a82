"""The host tier: entries in this process's memory, under a hard cap.

Worth having where the disk is slow or shared with others, or where KV goes on to a device, for which the memory is
page-locked. On a local disk the kernel keeps what is asked for in its page cache anyway. Gone with the process.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor

from kvweave.store.format import Content, StoredEntry, parse_entry, verify_content
from kvweave.store.tiers.residents import Resident, Residents
from kvweave.store.tiers.tier import Blob, owned_copy


@dataclass(frozen=True, slots=True)
class HostEntry:
    """An entry's bytes (n,) uint8, and what is in them; views of the bytes.

    `only_shared`: it came from the shared tier, and the disk had no room for it.
    """

    data: Tensor
    stored: StoredEntry
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

    def admit(self, key: str, data: Blob, standing: float) -> dict[str, Resident[HostEntry]]:
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
