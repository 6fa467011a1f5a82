"""Half filled pages: the last ones of the clusters that grow, kept in frames so that flash sees whole pages (DynaKV §5.2).

Each head keeps a few; of one more, the one that grew longest ago is written as it is. With what is resident they are all of a
cluster that is in memory.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.clusters.table import Key
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.flash.cluster_pages import ClusterPages
from kvweave.decode.residency.frames import Frames
from kvweave.decode.residency.residents import Residents


class Tails:
    """The frames of half filled pages, by cluster; a head keeps `most`."""

    def __init__(
        self, pages: ClusterPages, residents: Residents[Frames], counts: DecodeCounts, most: int
    ) -> None:
        self._pages = pages
        self._residents = residents
        self._counts = counts
        self._most = most
        # Of a head of a layer: cluster → frame.
        self._frames: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)

    def __contains__(self, key: Key) -> bool:
        return key[2] in self._frames[key[:2]]

    def __len__(self) -> int:
        return sum(map(len, self._frames.values()))

    def keys(self) -> list[Key]:
        """The clusters whose last page is here; of a head's, the latest stands last."""
        return [(layer, head, cluster) for (layer, head), own in self._frames.items() for cluster in own]

    # One cluster's last page

    def keep(self, key: Key, frame: int) -> None:
        """Have this frame as a cluster's last page; another one of its head may be written for it."""
        own = self._frames[key[:2]]
        own[key[2]] = frame
        if len(own) > self._most:
            self.write((*key[:2], next(iter(own))))

    def take(self, key: Key) -> int:
        """The frame of a cluster's last page, which is the caller's then, unwritten."""
        return self._frames[key[:2]].pop(key[2])

    def write(self, key: Key) -> None:
        """Write a cluster's last page as it is and let it go; it stays where it cannot be written."""
        frame = self._frames[key[:2]][key[2]]
        self._pages.write(key, self._residents.frames, [frame], self._pages.pages_of(key) - 1)
        self._counts.partial_pages += 1
        self.let_go(key, self.take(key))

    def let_go(self, key: Key, frame: int) -> None:
        """A last page that flash holds now: resident with the cluster where that is, else out of memory."""
        if key in self._residents:
            self._residents.frames_of(key).append(frame)
            self._residents.update(key)
        else:
            self._residents.frames.give([frame])

    # All of them

    def write_all(self) -> None:
        """Write every last page."""
        for key in self.keys():
            self.write(key)

    def write_any(self) -> bool:
        """Write one page of whichever head has the most, the oldest; False if there is none."""
        head = max(self._frames, key=lambda own: len(self._frames[own]), default=None)
        if head is None or not self._frames[head]:
            return False
        self.write((*head, next(iter(self._frames[head]))))
        return True

    # What of a cluster is where

    def frames_of(self, keys: Sequence[Key]) -> list[list[int]]:
        """Frames of clusters in memory, in the order of their pages."""
        found = []
        for key in keys:
            resident = self._residents.frames_of(key) if key in self._residents else []
            last = self._frames[key[:2]].get(key[2])
            found.append(resident if last is None else [*resident, last])
        return found

    def on_flash(self, keys: Sequence[Key], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages of clusters of these sizes that lie on flash as they should be."""
        here = np.fromiter((key in self for key in keys), np.int64, len(keys))
        return self._pages.form.pages(sizes) - here
