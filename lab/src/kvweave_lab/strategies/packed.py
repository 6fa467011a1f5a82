"""Clusters on disk without free space between them, so that growth moves all later clusters of a head."""

import os
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.cluster_table import ClusterKey
from kvweave.decode.disk.layout import Owner
from kvweave.decode.disk.page_file import AlignedBuffer, Run, wait_for
from kvweave.errors import InvalidRequest
from kvweave_lab.strategies.adaptive import SplitCounts, SplittableStore

REGION_PAGES = 2**18
"""Length of a head's region."""


@dataclass(frozen=True, slots=True)
class Move:
    """Pages `first` … `first + pages` − 1 move to `target`; the two ranges may overlap."""

    first: int
    pages: int
    target: int


class PackedRegions:
    """Homes of any length, one per cluster, in the order of their numbers and without gaps, in a region per owner.

    `largest_pages` changes nothing: homes grow.
    """

    home_pages = REGION_PAGES

    def __init__(self, largest_pages: int) -> None:
        self._homes: dict[Owner, list[int]] = defaultdict(list)
        self._owners: list[Owner] = []  # of each home
        self._lengths: list[int] = []  # of each home
        self._regions: dict[Owner, int] = {}

    def allocate(self, owner: Owner) -> int:
        """Return a new, empty home after all others of the owner."""
        home = len(self._owners)
        self._owners.append(owner)
        self._lengths.append(0)
        self._homes[owner].append(home)
        self._regions.setdefault(owner, len(self._regions))
        return home

    def free(self, owner: Owner, home: int) -> None:
        """Do nothing: a cluster keeps its only home."""

    def make_room(self, home: int, pages: int) -> list[Move]:
        """Make a home this long; return what must be moved, in order. Raises InvalidRequest if the region is full."""
        more = pages - self._lengths[home]
        if more <= 0:
            return []
        owner = self._owners[home]
        homes = self._homes[owner]
        following = sum(self._lengths[other] for other in homes[homes.index(home) + 1 :])
        if sum(self._lengths[other] for other in homes) + more > REGION_PAGES:
            raise InvalidRequest(f"a head's clusters outgrow {REGION_PAGES} pages; use another strategy")
        end = self._start(home) + self._lengths[home]
        self._lengths[home] = pages
        return [Move(end, following, end + more)] if following else []

    def page_numbers(self, homes: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where pages (n,) of homes (n,) are."""
        distinct, index = np.unique(homes, return_inverse=True)
        starts = np.fromiter(map(self._start, distinct.tolist()), np.int64, len(distinct))
        return starts[index] + pages

    def state(self) -> dict[str, object]:
        """Return JSON values for `restore`."""
        return {"owners": [list(owner) for owner in self._owners], "lengths": self._lengths}

    def restore(self, state: dict[str, object]) -> None:
        """Restore what `state` returned."""
        for layer, head in state["owners"]:  # type: ignore[attr-defined]
            self.allocate((layer, head))
        self._lengths = list(state["lengths"])  # type: ignore[call-overload]

    def _start(self, home: int) -> int:
        owner = self._owners[home]
        homes = self._homes[owner]
        before = sum(self._lengths[other] for other in homes[: homes.index(home)])
        return self._regions[owner] * REGION_PAGES + before


class PackedStore(SplittableStore):
    """Moves the clusters after one that grows, in packed regions."""

    def _reserve(self, key: ClusterKey, pages: int) -> None:
        super()._reserve(key, pages)
        layer, head, cluster = key
        layout = self.pages.layout
        assert isinstance(layout, PackedRegions)
        for move in layout.make_room(self.tables[layer].homes_of(head, cluster)[-1], pages):
            self._reads.wait_for_all()
            self._move(move)

    def _move(self, move: Move) -> None:
        """Move pages, the last ones first; no reads may be in flight."""
        file, page_bytes, most = self.pages.file, self.entry_format.page_bytes, self.pages.largest_pages
        buffer = AlignedBuffer(most * page_bytes)
        end = min(
            move.first + move.pages, os.fstat(file.descriptor).st_size // page_bytes
        )  # nothing is written beyond
        while end > move.first:
            start = max(move.first, end - most)
            part = buffer.view[: (end - start) * page_bytes]
            wait_for(file.read([Run(start, end - start, (part,))]))
            file.write(start - move.first + move.target, [part])
            assert isinstance(self._counts, SplitCounts)
            self._counts.moved_bytes += len(part)
            end = start
