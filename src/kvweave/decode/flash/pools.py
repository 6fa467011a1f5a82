"""Which pages belong to which cluster: two clusters back to back in a pool, each growing inward (DynaKV §5.2).

A pool is as long as two clusters of the largest size. Its first half is filled upward from the front, its second
downward from the back, so that either grows without moving anything, and the second half of one pool and the first
of the next are neighbours on flash. Knows nothing of memory or of what clusters hold.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Move:
    """Pages `first` … `first + pages` − 1 move to `to`; the two may overlap."""

    first: int
    pages: int
    to: int


class Places(Protocol):
    """A layout: homes for clusters by number, each at most `half_pages` long; an owner is a head of a layer."""

    half_pages: int

    def take(self, owner: tuple[int, int]) -> int:
        """A home for one of the owner's clusters; its number is larger than those that lie before it."""
        ...

    def give(self, owner: tuple[int, int], half: int) -> None:
        """Take a home back."""
        ...

    def reserve(self, half: int, pages: int) -> list[Move]:
        """Have room for so many pages; what must move for it."""
        ...

    def numbers(self, halves: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where pages (n,) of homes (n,) lie in the file; a home's first page is 0."""
        ...

    def state(self) -> dict[str, object]:
        """What `restore` needs, as JSON values."""
        ...

    def restore(self, state: dict[str, object]) -> None:
        """Go on from what `state` gave."""
        ...


class DualHeadPools:
    """Halves of pools, given out by number: half h is the first (h even) or second (h odd) of pool h // 2.

    `half_pages` is the length of a half. An owner, a head of a layer, has pools to itself.
    """

    def __init__(self, half_pages: int) -> None:
        self.half_pages = half_pages
        self._open: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.pools = 0

    def take(self, owner: tuple[int, int]) -> int:
        """A half for one of the owner's clusters: next to a cluster without a partner, else in a new pool."""
        open_halves = self._open[owner]
        if open_halves:
            return open_halves.pop()
        first = 2 * self.pools
        self.pools += 1
        open_halves.append(first + 1)
        return first

    def give(self, owner: tuple[int, int], half: int) -> None:
        """Take a half back."""
        self._open[owner].append(half)

    def reserve(self, half: int, pages: int) -> list[Move]:
        """A half has all its room from the start: nothing moves."""
        return []

    def numbers(self, halves: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where pages (n,) of halves' clusters (n,) lie: from the pool's front, or from its back."""
        inward = np.where(halves % 2 == 0, pages, 2 * self.half_pages - 1 - pages)
        return halves // 2 * 2 * self.half_pages + inward

    def state(self) -> dict[str, object]:
        """What `restore` needs, as JSON values."""
        return {
            "pools": self.pools,
            "open": [[*owner, halves] for owner, halves in self._open.items() if halves],
        }

    def restore(self, state: dict[str, object]) -> None:
        """Go on from what `state` gave."""
        self.pools = int(state["pools"])  # type: ignore[call-overload]
        for layer, head, halves in state["open"]:  # type: ignore[attr-defined]
            self._open[layer, head] = list(halves)
