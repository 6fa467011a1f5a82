"""What a place that machines share has to do: keep entries' bytes under a key, and give the same bytes back.

Such a tier knows nothing of what the bytes mean, of other tiers, of caps or of heat. Whoever reads verifies, so that a tier
may be any server that anybody can write to: what it gives back altered is a counted, logged miss.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

Blob: TypeAlias = bytes | bytearray | memoryview
"""An entry in the stored format (lab/docs/format.md), or a part of one."""

Range: TypeAlias = tuple[int, int]
"""Where a part of an entry begins and ends, in bytes."""


class RemoteTier(Protocol):
    """Keeps entries, by the digest of their key (`EntryKey.digest`). Safe to use from several threads.

    What cannot be done because the place does not answer, refuses or fails raises TierUnavailable; nothing else is raised.
    """

    @property
    def place(self) -> str:
        """Names the place for people and tells it from others; no passwords."""
        ...

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        """The bytes of those that are here, as they were put; nobody writes to them."""
        ...

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[Blob] | None:
        """Parts of one entry, as they are there now; None if it is not here. One request, as far as the place has such.

        Args:
            key: which entry.
            ranges: at least one, none of them empty. Of a range that goes beyond the entry's end comes what
                there is. Where nothing at all is in them, None is an answer too.
        """
        ...

    def put(self, key: str, data: Blob) -> None:
        """Keep an entry, in place of any earlier one of this key: whole, or not at all."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Let go of these; those that are not here are no error."""
        ...

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        """Which of these are here."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Every entry that is here with its size in bytes; together, what the tier takes."""
        ...

    def close(self) -> None:
        """Let go of connections; using it afterwards is an error."""
        ...


def owned_copy(data: Blob, page_locked: bool = False) -> Tensor:
    """A copy (n,) uint8 of an entry's bytes, aligned as `parse_entry` wants it; a device can read it itself if `page_locked`."""
    copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=page_locked)
    copy.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return copy
