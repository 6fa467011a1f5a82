"""Layout of clusters in the file: which pages belong to which cluster, and which clusters are neighbours.

A cluster's pages are in homes, which a layout allocates by number. Knows nothing of memory or of what clusters hold.
"""

from collections import defaultdict
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Owner = tuple[int, int]
"""A head of a layer: layer, head."""


class Layout(Protocol):
    """Homes for clusters, by number; each is at most `home_pages` long."""

    home_pages: int

    def allocate(self, owner: Owner) -> int:
        """Return a home for one of the owner's clusters; later homes in the file have larger numbers."""

    def free(self, owner: Owner, home: int) -> None:
        """Free a home."""

    def page_numbers(self, homes: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where pages (n,) of homes (n,) are in the file; a home's first page is 0."""

    def state(self) -> dict[str, object]:
        """Return JSON values for `restore`."""

    def restore(self, state: dict[str, object]) -> None:
        """Restore what `state` returned."""


class DualHeadPools:
    """Homes are halves of pools: two clusters back to back, each growing inward (DynaKV §5.2).

    A pool is twice as long as the largest cluster. Its first half is filled upward from the front, its second downward
    from the back, so that either grows without moving anything. The second half of a pool and the first half of the next
    are neighbours on disk. Home h is the first (h even) or second (h odd) half of pool h // 2. Each owner has its own
    pools.
    """

    def __init__(self, home_pages: int) -> None:
        self.home_pages = home_pages
        self.pools = 0
        self._free: dict[Owner, list[int]] = defaultdict(list)

    def allocate(self, owner: Owner) -> int:
        """Return the half next to a cluster without a partner, else the first half of a new pool."""
        free = self._free[owner]
        if free:
            return free.pop()
        first = 2 * self.pools
        self.pools += 1
        free.append(first + 1)
        return first

    def free(self, owner: Owner, home: int) -> None:
        self._free[owner].append(home)

    def page_numbers(self, homes: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where pages (n,) of halves (n,) are, counted from a pool's front or from its back."""
        inward = np.where(homes % 2 == 0, pages, 2 * self.home_pages - 1 - pages)
        return homes // 2 * 2 * self.home_pages + inward

    def state(self) -> dict[str, object]:
        return {
            "pools": self.pools,
            "open": [[*owner, homes] for owner, homes in self._free.items() if homes],
        }

    def restore(self, state: dict[str, object]) -> None:
        self.pools = int(state["pools"])  # type: ignore[call-overload]
        for layer, head, homes in state["open"]:  # type: ignore[attr-defined]
            self._free[layer, head] = list(homes)


def co_retrievals(retrieved: Tensor) -> Tensor:
    """Return how often each pair of clusters was retrieved by the same query: (queries, K) bool → (K, K), Eq. 8's f."""
    counts = retrieved.float()
    return (counts.T @ counts).fill_diagonal_(0)


def neighbour_order(counts: Tensor) -> list[int]:
    """Return an order of all K clusters in which each is followed by the free one most often retrieved with it.

    `counts` (K, K) is symmetric. Starts at the cluster most often retrieved with others. Ties, and clusters never
    retrieved, are ordered by number.
    """
    clusters = counts.shape[0]
    free = torch.ones(clusters, dtype=torch.bool)
    totals = counts.sum(1)
    order: list[int] = []
    for _ in range(clusters):
        weights = counts[order[-1]] if order else totals
        candidates = torch.where(free, weights, -1.0)
        best = int(candidates.argmax())
        if order and float(candidates[best]) <= 0:  # nothing was retrieved with the last one: start elsewhere
            best = int(torch.where(free, totals, -1.0).argmax())
        order.append(best)
        free[best] = False
    return order
