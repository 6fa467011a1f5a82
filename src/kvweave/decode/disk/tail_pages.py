"""Half filled pages of clusters that are not in memory: kept in frames, so that flash sees whole pages (DynaKV §5.2).

Each head keeps a few; of one more, the one that came first is written as it is. A cluster in memory has its last page
there: it comes here when the cluster leaves, or grows without being in memory.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.clusters.table import Key, Keys, as_keys
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.pages import ClusterPages
from kvweave.decode.page_cache.frames import Frames


class Tails:
    """The frames of half filled pages, by cluster; a head keeps `most`."""

    def __init__(self, pages: ClusterPages, frames: Frames, counts: DecodeCounts, most: int) -> None:
        self._pages = pages
        self._frames = frames
        self._counts = counts
        self._most = most
        self._count = 0
        # Of a head of a layer: cluster → frame.
        self._held: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    def __contains__(self, key: Key) -> bool:
        return key[2] in self._held[key[:2]]

    def __len__(self) -> int:
        return self._count

    def keys(self) -> list[Key]:
        """The clusters whose last page is here; of a head's, the latest stands last."""
        return [(layer, head, cluster) for (layer, head), own in self._held.items() for cluster in own]

    def holds(self, keys: Keys) -> NDArray[np.bool_]:
        """Of which of these clusters the last page is here, (n,)."""
        found = (cluster in self._held[layer, head] for layer, head, cluster in as_keys(keys).tolist())
        return np.fromiter(found, np.bool_, len(keys))

    def frame_of(self, key: Key) -> int:
        """The frame of a cluster's last page, which stays here."""
        return self._held[key[:2]][key[2]]

    def keep(self, key: Key, frame: int) -> None:
        """Have this frame as a cluster's last page; another one of its head may be written for it."""
        own = self._held[key[:2]]
        own[key[2]] = frame
        self._count += 1
        if len(own) > self._most:
            self._write_first(key[:2])

    def take(self, key: Key) -> int:
        """The frame of a cluster's last page, which is the caller's then, unwritten."""
        frame = self._held[key[:2]].pop(key[2])
        self._count -= 1
        return frame

    def write_any(self) -> bool:
        """Write the first page of whichever head has the most, and give its frame back; False if there is none."""
        head = max(self._held, key=lambda own: (len(self._held[own]), own), default=None)
        if head is None or not self._held[head]:
            return False
        self._write_first(head)
        return True

    def _write_first(self, head: tuple[int, int]) -> None:
        """Write a head's first page and give its frame back; it stays where it cannot be written."""
        key = (*head, next(iter(self._held[head])))
        self._pages.write_last([key], self._frames, [self.frame_of(key)])
        self._counts.partial_pages += 1
        self._frames.give([self.take(key)])
