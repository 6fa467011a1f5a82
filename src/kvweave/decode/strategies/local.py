"""Newcomers wait until there are some and are then grouped among themselves: the local update of ClusterKV.

Paper: DynaKV §2.3, its baseline. Those that wait are attended to, and count in the budget: where it is small, fewer
wait.
"""

import torch
from torch import Tensor

from kvweave.decode.budget import Allowance
from kvweave.decode.clusters.buffers import UNGROUPED
from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.ops.kmeans import k_means


class Local(ClusterRetriever):
    """Groups each window of newcomers alone; clusters made once never change."""

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: Allowance) -> None:
        """Let one entry per head wait, and group them when there are enough."""
        for head in range(keys.shape[0]):
            self.waiting.put(head, UNGROUPED, entries[head])
        clusters = self.parts.settings.clusters
        free = allowed.total - self.parts.settings.sinks - allowed.window
        if self.waiting.count[0] >= max(1, min(clusters.local_entries, free // 2)):
            self._group(clusters.mean_entries)

    def _group(self, mean_entries: int) -> None:
        entries = torch.stack([self.waiting.take(head, UNGROUPED) for head in range(self.table.heads)])
        keys = self.store.form.decode(entries)[0].float()  # (G, n, D)
        assigned = k_means(keys, -(-keys.shape[1] // mean_entries))
        for head in range(self.table.heads):
            for own in self._members(keys[head], assigned[head]):
                self.make(head, keys[head, own], entries[head, own])
