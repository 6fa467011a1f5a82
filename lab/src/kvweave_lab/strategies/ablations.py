"""DynaKV with one technique switched off, so that its benefit can be measured."""

from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from kvweave.decode.store.page_cache import ClusterUsage, EvictionScores
from kvweave.decode.strategy import TokenBudget
from kvweave_lab.strategies.adaptive import DYNAKV, AdaptiveClusters
from kvweave_lab.strategies.centroid import centroids_of
from kvweave_lab.strategies.centroids import Centroids
from kvweave_lab.strategies.packed import PackedRegions, PackedStore


class ImmediateSplits(AdaptiveClusters):
    """A cluster that grows too wide is read and split at once; no entry is buffered for it."""

    def buffer_limit(self, budget: TokenBudget) -> int:
        """Return 0."""
        return 0


class OrderMade(AdaptiveClusters):
    """A prompt's clusters are written one after another, not those together that are retrieved together."""

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """As without queries."""
        super().fill(keys, values, None)


class NoPrefetch(AdaptiveClusters):
    """No clusters are read before their layer attends."""

    def prefetch(self) -> None:
        """Read nothing."""


class ResidentCentroids(Centroids):
    """Centroids of all layers stay in memory."""

    def release(self, layer: int, *, write: bool = False) -> None:
        """Write changed rows as without this, and keep the memory."""
        own = self.layers[layer]
        memory, buffer = own.memory, own.buffer
        super().release(layer, write=write)
        if memory is not None:
            own.memory, own.buffer, own.ready = memory, buffer, True


def lru_scores(usage: ClusterUsage) -> EvictionScores:
    """Least recently used first."""
    return (usage.now - usage.used_at).astype(np.float64)


def lfu_scores(usage: ClusterUsage) -> EvictionScores:
    """Least frequently used first; among equals, least recently used first."""
    age = (usage.now - usage.used_at).astype(np.float64)
    scores: EvictionScores = age / (age.max(initial=0) + 1) - usage.uses
    return scores


IMMEDIATE_SPLIT = replace(DYNAKV, retriever=ImmediateSplits)
MADE_ORDER = replace(DYNAKV, retriever=OrderMade)
PACKED = replace(DYNAKV, layout=PackedRegions, store=PackedStore)
NO_PREFETCH = replace(DYNAKV, retriever=NoPrefetch)
LRU = replace(DYNAKV, eviction=lru_scores)
LFU = replace(DYNAKV, eviction=lfu_scores)
RESIDENT_CENTROIDS = replace(DYNAKV, index=partial(centroids_of, kind=ResidentCentroids))
