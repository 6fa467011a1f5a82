"""Clusters one behind the other without room between them: the layout that dual-head pools are measured against.

When a cluster grows, everything behind it moves on (DynaKV fig. 13, "cluster by cluster"). Each head has a stretch of
a sparse file to itself. Knows nothing of memory or of what clusters hold.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.flash.pools import Move
from kvweave.errors import InvalidRequest

REGION_PAGES = 2**18
"""Length of a head's stretch."""


class PackedRegions:
    """Homes by number, in the order in which they lie in their owner's stretch; a cluster has one, of any length."""

    half_pages = REGION_PAGES

    def __init__(self) -> None:
        self._homes: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._owners: list[tuple[int, int]] = []  # by home
        self._lengths: list[int] = []
        self._regions: dict[tuple[int, int], int] = {}

    def take(self, owner: tuple[int, int]) -> int:
        """A home behind all others of the owner, of no length yet."""
        home = len(self._owners)
        self._owners.append(owner)
        self._lengths.append(0)
        self._homes[owner].append(home)
        self._regions.setdefault(owner, len(self._regions))
        return home

    def give(self, owner: tuple[int, int], half: int) -> None:
        """A home once taken is kept: its cluster has but one."""

    def numbers(self, halves: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where pages (n,) of homes (n,) lie."""
        own, place = np.unique(halves, return_inverse=True)
        starts = np.fromiter(map(self._start, own.tolist()), np.int64, len(own))
        return starts[place] + pages

    def reserve(self, half: int, pages: int) -> list[Move]:
        """Make a home so long; what must move for it, in order. Raises InvalidRequest if the stretch is full."""
        more = pages - self._lengths[half]
        if more <= 0:
            return []
        owner = self._owners[half]
        homes = self._homes[owner]
        behind = sum(self._lengths[home] for home in homes[homes.index(half) + 1 :])
        if sum(self._lengths[home] for home in homes) + more > REGION_PAGES:
            raise InvalidRequest(f"a head's clusters outgrow {REGION_PAGES} pages; use the dual-head layout")
        end = self._start(half) + self._lengths[half]
        self._lengths[half] = pages
        return [Move(end, behind, end + more)] if behind else []

    def state(self) -> dict[str, object]:
        """What `restore` needs, as JSON values."""
        return {"owners": [list(owner) for owner in self._owners], "lengths": self._lengths}

    def restore(self, state: dict[str, object]) -> None:
        """Go on from what `state` gave."""
        for layer, head in state["owners"]:  # type: ignore[attr-defined]
            self.take((layer, head))
        self._lengths = list(state["lengths"])  # type: ignore[call-overload]

    def _start(self, half: int) -> int:
        owner = self._owners[half]
        homes = self._homes[owner]
        before = sum(self._lengths[home] for home in homes[: homes.index(half)])
        return self._regions[owner] * REGION_PAGES + before
