"""The order in which clusters are first written: those that queries ask for together become neighbours (DynaKV §5.1).

Counted once, from the queries of the prompt's last rows. Knows nothing of files.
"""

import torch
from torch import Tensor


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
