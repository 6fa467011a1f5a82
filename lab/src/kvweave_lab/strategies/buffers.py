"""Entries buffered in memory until they join a cluster; every step attends to them.

Tensor letters: G KV heads, B capacity per head, E bytes of an entry. Knows nothing of why an entry is buffered.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MIN_GROWTH = 4


class BufferedEntries:
    """Entries (G, B, E) and the cluster that each is buffered for; B grows as needed."""

    def __init__(self, heads: int, entry_bytes: int) -> None:
        self.count: NDArray[np.int64] = np.zeros(heads, np.int64)
        self.entries = torch.zeros(heads, 0, entry_bytes, dtype=torch.uint8)
        self._owners: NDArray[np.int64] = np.zeros((heads, 0), np.int64)

    @property
    def resident_bytes(self) -> int:
        return self.entries.nbytes

    def growth_bytes(self, head: int) -> int:
        """Return the extra memory needed to add one entry to a head.

        The old memory is released only after the copy.
        """
        heads, capacity, length = self.entries.shape
        return 0 if self.count[head] < capacity else heads * (capacity + max(_MIN_GROWTH, capacity)) * length

    def add(self, head: int, owner: int, entry: Tensor) -> None:
        """Buffer a copy of an entry (E,) for a cluster."""
        at = int(self.count[head])
        if at == self.entries.shape[1]:
            more = max(_MIN_GROWTH, at)
            self.entries = torch.nn.functional.pad(self.entries, (0, 0, 0, more))
            self._owners = np.pad(self._owners, ((0, 0), (0, more)))
        self.entries[head, at] = entry
        self._owners[head, at] = owner
        self.count[head] += 1

    def pop(self, head: int, owner: int) -> Tensor:
        """Remove and return the entries (n, E) buffered for a cluster."""
        count = int(self.count[head])
        mine = torch.from_numpy(self._owners[head, :count] == owner)
        entries = self.entries[head, :count]
        popped, kept = entries[mine].clone(), entries[~mine].clone()
        self.entries[head, : kept.shape[0]] = kept
        self._owners[head, : kept.shape[0]] = self._owners[head, :count][~mine.numpy()]
        self.count[head] = kept.shape[0]
        return popped

    def owners(self, head: int) -> list[int]:
        return [int(owner) for owner in np.unique(self._owners[head, : self.count[head]])]

    def fullest(self, head: int) -> int:
        """Return the cluster for which most entries of a head are buffered."""
        owners, counts = np.unique(self._owners[head, : self.count[head]], return_counts=True)
        return int(owners[counts.argmax()])

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return all entries (G, b, E), read-only, and a mask (G, 1, b) of those that exist."""
        longest = int(self.count.max(initial=0))
        valid = torch.arange(longest) < torch.from_numpy(self.count)[:, None]
        return self.entries[:, :longest], valid[:, None]
