"""Replacement policies: a score for each cluster in memory; those with the largest score are evicted first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EvictionScores = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""One score per cluster, (n,)."""

UPDATED_ROWS = 16
"""A cluster counts as recently updated for this many rows; the paper tracks updates as long (Table 2)."""
UPDATED_SHARE = 0.25
"""Recently updated clusters are protected up to this share of the frames."""


@dataclass(frozen=True, slots=True)
class ClusterUsage:
    """Usage of clusters in memory, arrays (n,).

    Attributes:
        used_at, updated_at: row of the last use, and of the last update.
        uses: number of uses.
        pages: size in pages.
        missed: how often the cluster's layer has attended without it since its last use.
        until_next: share of a row until the cluster's layer attends again, in [0, 1).
        now: the current row.
        frames: number of all frames.
    """

    used_at: NDArray[np.int64]
    updated_at: NDArray[np.int64]
    uses: NDArray[np.int64]
    pages: NDArray[np.int64]
    missed: NDArray[np.int64]
    until_next: NDArray[np.float64]
    now: int
    frames: int


def lru_scores(usage: ClusterUsage) -> EvictionScores:
    """Least recently used first."""
    return (usage.now - usage.used_at).astype(np.float64)


def lfu_scores(usage: ClusterUsage) -> EvictionScores:
    """Least frequently used first; among equals, least recently used first."""
    age = (usage.now - usage.used_at).astype(np.float64)
    scores: EvictionScores = age / (age.max(initial=0) + 1) - usage.uses
    return scores


def cluster_scores(usage: ClusterUsage) -> EvictionScores:
    """Large clusters without recent use first; recently updated ones last, while they take a quarter of the frames at most.

    Size and age weigh alike: a cluster of twice the size must have been used twice as recently to stay. Layers attend in
    turn, so age is how often the cluster's own layer attended without it. Of two equals, the one whose layer attends
    later is evicted first.
    """
    scores = (1 + usage.missed + usage.until_next / 2) * usage.pages
    since = usage.now - usage.updated_at
    latest = np.argsort(since, kind="stable")
    within = np.cumsum(usage.pages[latest]) <= UPDATED_SHARE * usage.frames
    protected = latest[within & (since[latest] <= UPDATED_ROWS)]
    scores[protected] = -1.0 / (1.0 + since[protected])
    return scores


REPLACEMENTS: Mapping[str, Callable[[ClusterUsage], EvictionScores]] = {
    "cluster": cluster_scores,
    "lru": lru_scores,
    "lfu": lfu_scores,
}
