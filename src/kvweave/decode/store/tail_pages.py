"""Half-filled last pages ("tails") of clusters that are not in memory, kept so that whole pages are written (DynaKV §5.2).

Each head keeps a few tails; beyond that, the oldest one is written half-filled. A cluster in memory has its last page
there. It moves here when the cluster is evicted, or when a cluster grows while it is not in memory.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.cluster_table import ClusterKey, ClusterKeys, key_array
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_pages import ClusterPages
from kvweave.decode.store.frames import FramePool


class TailPages:
    """Frames of tails, by cluster; each head keeps at most `limit`."""

    def __init__(self, pages: ClusterPages, frames: FramePool, counts: DecodeCounts, limit: int) -> None:
        self._pages = pages
        self._frames = frames
        self._counts = counts
        self._limit = limit
        self._total = 0
        self._tails: dict[tuple[int, int], dict[int, int]] = defaultdict(
            dict
        )  # layer, head → cluster → frame

    def __contains__(self, key: ClusterKey) -> bool:
        return key[2] in self._tails[key[:2]]

    def __len__(self) -> int:
        return self._total

    def keys(self) -> list[ClusterKey]:
        """Return the clusters that have a tail here; those of a head from the oldest to the latest."""
        return [(layer, head, cluster) for (layer, head), own in self._tails.items() for cluster in own]

    def contains(self, keys: ClusterKeys) -> NDArray[np.bool_]:
        """Return which of these clusters have a tail here, (n,)."""
        found = (cluster in self._tails[layer, head] for layer, head, cluster in key_array(keys).tolist())
        return np.fromiter(found, np.bool_, len(keys))

    def frame_of(self, key: ClusterKey) -> int:
        return self._tails[key[:2]][key[2]]

    def add(self, key: ClusterKey, frame: int) -> None:
        """Add a tail as its head's latest; if the head has too many, write the oldest."""
        own = self._tails[key[:2]]
        own[key[2]] = frame
        self._total += 1
        if len(own) > self._limit:
            self._write_oldest(key[:2])

    def pop(self, key: ClusterKey) -> int:
        """Remove a tail without writing it; return its frame, which belongs to the caller then."""
        frame = self._tails[key[:2]].pop(key[2])
        self._total -= 1
        return frame

    def evict_one(self) -> bool:
        """Write the oldest tail of the head that has most, and free its frame; False if there is none."""
        head = max(self._tails, key=lambda own: (len(self._tails[own]), own), default=None)
        if head is None or not self._tails[head]:
            return False
        self._write_oldest(head)
        return True

    def _write_oldest(self, head: tuple[int, int]) -> None:
        """Write a head's oldest tail and free its frame; if the write fails, the tail stays."""
        key = (*head, next(iter(self._tails[head])))
        self._pages.write_last([key], self._frames, [self.frame_of(key)])
        self._counts.partial_pages += 1
        self._frames.free([self.pop(key)])
