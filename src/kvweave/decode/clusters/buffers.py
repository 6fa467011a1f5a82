"""Entries that wait in memory for a cluster: of flagged clusters until they are split, of none until they are grouped.

They are attended to in every step. Tensor letters: G KV heads, B room per head, E bytes of an entry. Knows nothing of
why an entry waits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LEAST = 4  # entries more, when there is no room
UNGROUPED = -1
"""Owner of entries that belong to no cluster yet."""


class BufferedEntries:
    """Entries (G, B, E) and the cluster that each waits for; B grows as needed."""

    def __init__(self, heads: int, entry_bytes: int) -> None:
        self.count: NDArray[np.int64] = np.zeros(heads, np.int64)
        self._entries = torch.zeros(heads, 0, entry_bytes, dtype=torch.uint8)
        self._owners: NDArray[np.int64] = np.zeros((heads, 0), np.int64)

    @property
    def resident_bytes(self) -> int:
        """What the entries' memory takes."""
        return self._entries.nbytes

    def growth_bytes(self, count: int) -> int:
        """What the entries' memory takes more while so many more are put for each head: the old one goes afterwards."""
        heads, capacity, length = self._entries.shape
        needed = int(self.count.max()) + count
        return 0 if needed <= capacity else heads * (capacity + max(_LEAST, capacity)) * length

    def put(self, head: int, owner: int, entry: Tensor) -> None:
        """Keep an entry (E,)."""
        at = int(self.count[head])
        if at == self._entries.shape[1]:
            more = max(_LEAST, at)
            self._entries = torch.nn.functional.pad(self._entries, (0, 0, 0, more))
            self._owners = np.pad(self._owners, ((0, 0), (0, more)))
        self._entries[head, at] = entry
        self._owners[head, at] = owner
        self.count[head] += 1

    def take(self, head: int, owner: int) -> Tensor:
        """The entries (n, E) that wait for a cluster; they wait no longer."""
        count = int(self.count[head])
        mine = torch.from_numpy(self._owners[head, :count] == owner)
        held = self._entries[head, :count]
        taken, kept = held[mine].clone(), held[~mine].clone()
        self._entries[head, : kept.shape[0]] = kept
        self._owners[head, : kept.shape[0]] = self._owners[head, :count][~mine.numpy()]
        self.count[head] = kept.shape[0]
        return taken

    def owners(self, head: int) -> list[int]:
        """The clusters that entries of a head wait for."""
        return [int(owner) for owner in np.unique(self._owners[head, : self.count[head]])]

    def fullest(self, head: int) -> int:
        """The cluster that most entries of a head wait for."""
        found, counts = np.unique(self._owners[head, : self.count[head]], return_counts=True)
        return int(found[counts.argmax()])

    def held(self) -> tuple[Tensor, Tensor]:
        """All entries (G, b, E) and which of them are there (G, 1, b); to be read only."""
        most = int(self.count.max(initial=0))
        there = torch.arange(most) < torch.from_numpy(self.count)[:, None]
        return self._entries[:, :most], there[:, None]

    def state(self) -> dict[str, Tensor]:
        """Copies, for `restore`."""
        return {
            "entries": self._entries.clone(),
            "owners": torch.from_numpy(self._owners.copy()),
            "count": torch.from_numpy(self.count.copy()),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Hold what `state` gave."""
        self._entries = state["entries"].clone()
        self._owners, self.count = state["owners"].numpy().copy(), state["count"].numpy().copy()
