"""Which clusters leave memory first: the usual orders, and one that knows what clusters are (DynaKV §6.2).

Each is a function of what is known about the clusters in memory, arrays of equal length; the largest values leave
first. Knows nothing of frames or files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Order = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""One number per cluster: the largest leave first."""

UPDATED_ROWS = 16
"""For how many rows a cluster counts as recently updated; the paper follows them as far (Table 2)."""
UPDATED_SHARE = 0.25
"""At most this share of the frames is kept for recently updated clusters."""


@dataclass(frozen=True, slots=True)
class Known:
    """About clusters in memory, (n,) each: the row at which each was last used and last updated, how often it was
    used, how many pages it takes, how often its layer attended without it since, and how much of a row it is until
    its layer attends again, in [0, 1). `now` is the current row, `frames` how many there are in all.
    """

    used_at: NDArray[np.int64]
    updated_at: NDArray[np.int64]
    uses: NDArray[np.int64]
    pages: NDArray[np.int64]
    missed: NDArray[np.int64]
    until: NDArray[np.float64]
    now: int
    frames: int


def least_recently_used(known: Known) -> Order:
    """LRU."""
    return (known.now - known.used_at).astype(np.float64)


def least_frequently_used(known: Known) -> Order:
    """LFU; among those used equally often, LRU."""
    age = (known.now - known.used_at).astype(np.float64)
    order: Order = age / (age.max(initial=0) + 1) - known.uses
    return order


def large_and_settled(known: Known) -> Order:
    """Large clusters not used of late leave first; recently updated ones stay while they take a quarter at most.

    Size weighs as age does: what is twice as large must have been used twice as recently to stay. Layers attend in
    turn, so age is how often a cluster's own layer did without it; of two alike the one leaves whose layer comes later.
    """
    last = (1 + known.missed + known.until / 2) * known.pages
    since = known.now - known.updated_at
    latest = np.argsort(since, kind="stable")
    within = np.cumsum(known.pages[latest]) <= UPDATED_SHARE * known.frames
    kept = latest[within & (since[latest] <= UPDATED_ROWS)]
    last[kept] = -1.0 / (1.0 + since[kept])
    return last


REPLACEMENTS: Mapping[str, Callable[[Known], Order]] = {
    "cluster": large_and_settled,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
}
