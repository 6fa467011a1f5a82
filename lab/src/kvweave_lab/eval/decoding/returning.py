"""Whether clusters that were just updated are retrieved soon after (DynaKV table 2), beside clusters drawn at random.

One layer's. Knows cluster numbers, sizes and choices, not how they come about.
"""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave_lab.eval.decoding.outcome import AFTER_STEPS, Again

_LAST = AFTER_STEPS[-1]


class _Waiting:
    """Clusters that were seen, and how many were retrieved so many steps later for the first time."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []  # head, cluster, steps since
        self._seen = 0
        self._after = [0] * (_LAST + 1)

    def see(self, head: int, cluster: int) -> None:
        self._open.append([head, cluster, 0])

    def step(self, chosen: Sequence[frozenset[int]]) -> None:
        still = []
        for one in self._open:
            head, cluster, _ = one
            one[2] += 1
            if cluster in chosen[head]:
                self._after[one[2]] += 1
                self._seen += 1
            elif one[2] == _LAST:
                self._seen += 1
            else:
                still.append(one)
        self._open = still

    def again(self) -> Again:
        """Those whose steps are over."""
        return Again(self._seen, tuple(sum(self._after[: steps + 1]) for steps in AFTER_STEPS))


class Returns:
    """Follows the clusters of one layer; `seed` says which are drawn at random."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._sizes: NDArray[np.int64] | None = None
        self.updated, self.any = _Waiting(), _Waiting()

    def step(self, sizes: NDArray[np.int64], chosen: Sequence[Sequence[int]]) -> None:
        """A step whose query chose these clusters of each head; `sizes` (G, C) tell which grew or split before it."""
        before, self._sizes = self._sizes, sizes.copy()
        if before is not None:
            old = np.zeros_like(sizes)
            old[:, : before.shape[1]] = before
            for head, cluster in np.argwhere(sizes != old).tolist():
                self.updated.see(head, cluster)
                self.any.see(head, self._random.randrange(max(1, int((sizes[head] > 0).sum()))))
        found = [frozenset(own) for own in chosen]
        self.updated.step(found)
        self.any.step(found)


def together(parts: Sequence[Again]) -> Again:
    """Of all layers."""
    return Again(
        sum(part.seen for part in parts),
        tuple(sum(part.retrieved[place] for part in parts) for place in range(len(AFTER_STEPS))),
    )
