"""Which pages belong to which cluster: two clusters back to back in a pool, each growing inward (DynaKV §5.2).

A pool is as long as two clusters of the largest size. Its first half is filled upward from the front, its second
downward from the back, so that either grows without moving anything, and the second half of one pool and the first
of the next are neighbours on flash. Knows nothing of memory or of what clusters hold.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import InvalidRequest


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


def together(retrieved: Tensor) -> Tensor:
    """How often each pair of clusters was retrieved for the same query: (queries, K) bool → (K, K), Eq. 8's f."""
    asked = retrieved.float()
    return (asked.T @ asked).fill_diagonal_(0)


def chain(counts: Tensor) -> list[int]:
    """An order of all K clusters in which each follows, where one is left, the one most often retrieved with it.

    `counts` (K, K) symmetric. Starts at the cluster that is retrieved with others most; ties and clusters that were
    never retrieved follow in the order they were made.
    """
    left = counts.clone()
    number = left.shape[0]
    free = torch.ones(number, dtype=torch.bool)
    strength = counts.sum(1)
    order: list[int] = []
    last = -1
    for _ in range(number):
        weights = left[last] if order else strength
        candidates = torch.where(free, weights, -1.0)
        best = int(candidates.argmax())
        if order and float(candidates[best]) <= 0:  # nothing was asked for with the last one: begin elsewhere
            best = int(torch.where(free, strength, -1.0).argmax())
        order.append(best)
        free[best] = False
        last = best
    return order


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
