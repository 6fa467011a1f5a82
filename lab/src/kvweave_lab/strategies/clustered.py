"""Baselines of DynaKV, which differ in how new entries join clusters."""

from typing import ClassVar

import torch
from torch import Tensor

from kvweave.decode.strategy import Strategy, TokenBudget
from kvweave.ops.kmeans import k_means, members
from kvweave_lab.strategies.centroid import CentroidClusters, CentroidSettings, centroids_of

UNGROUPED = -1
"""Owner of buffered entries that belong to no cluster yet."""


class StaticClusters(CentroidClusters):
    """Clusters that are never split: a new entry joins the nearest one, whose centroid and variance follow."""

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Append one entry per head."""
        for head, (cluster, distance) in enumerate(self.nearest_clusters(keys)):
            self.join_cluster(head, cluster, keys[head], entries[head], distance)


class LocalClusters(CentroidClusters):
    """Clusters that never change: each window of new entries is clustered by itself."""

    window_entries: ClassVar[int] = 128
    """How many new entries are collected before they are clustered; fewer where the budget is small."""

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Buffer one entry per head, and cluster the buffer when it is full."""
        for head in range(keys.shape[0]):
            self.buffer_entry(head, UNGROUPED, entries[head])
        free = budget.total - self.shared.settings.sinks - budget.window
        if self.buffer.count[0] >= max(1, min(self.window_entries, free // 2)):
            self._cluster_buffer()

    def _cluster_buffer(self) -> None:
        entries = torch.stack([self.buffer.pop(head, UNGROUPED) for head in range(self.table.heads)])
        keys = self.with_centre(self.store.entry_format.decode(entries)[0].float())  # (G, n, D)
        assigned = k_means(keys, -(-keys.shape[1] // self.clusters.mean_entries))
        for head in range(self.table.heads):
            for own in members(keys[head], assigned[head], self.clusters.max_entries):
                self.create_cluster(head, keys[head, own], entries[head, own])


STATIC = Strategy(StaticClusters, CentroidSettings(), index=centroids_of)
LOCAL = Strategy(LocalClusters, CentroidSettings(), index=centroids_of)
