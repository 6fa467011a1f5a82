"""What a remote tier has to do: keep bytes under keys.

It knows nothing of what the bytes mean, of other tiers, of caps or of eviction scores. Any server may be one, even
if others can write to it: readers verify what they get, and altered bytes are a counted, logged miss.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.keys import EntryKey

Blob: TypeAlias = bytes | bytearray | memoryview
"""An entry in the stored format (docs/reference/file-format.md), or a part of one."""


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """An entry that the catalogue lists, in file `path`. `token_ids` are the ids it must hold, None if not known yet."""

    key: EntryKey
    path: str
    token_ids: Sequence[int] | None = None


class RemoteTier(Protocol):
    """Keeps entries by the digest of their key (`EntryKey.digest`). Safe to use from several threads.

    A call raises TierUnavailable, and nothing else, if the server does not answer, refuses or fails.
    """

    @property
    def location(self) -> str:
        """Where the tier is: for people, and to tell it from others; without passwords."""
        ...

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        """Return the bytes of those entries that are here, as they were put; callers must not write to them."""
        ...

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        """Return parts of one entry, or None if it is not here. One request, if the server supports that.

        Args:
            key: which entry.
            ranges: at least one, none of them empty. A range beyond the entry's end is cut short. If the entry has no byte
                in any of the ranges, the answer may be None too.
        """
        ...

    def put(self, key: str, data: Blob) -> None:
        """Store an entry, replacing any earlier one of this key: whole, or not at all."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these; missing ones are no error."""
        ...

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        """Return which of these are here."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Return every entry that is here with its size in bytes; their sum is what the tier takes."""
        ...

    def close(self) -> None:
        """Close connections; using the tier afterwards is an error."""
        ...


def owned_copy(data: Blob, page_locked: bool = False) -> Tensor:
    """Return a copy (n,) uint8 of an entry's bytes, aligned for `parse_entry`; page-locked for fast copies to a device."""
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=page_locked)
    copy.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return copy
