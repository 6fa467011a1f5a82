"""Retrieval of all entries: nothing is chosen, so that nothing has to be known of clusters. Tensor letters: G KV heads, n entries."""

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.outlined import OutlinedClusters
from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.retriever import CacheHooks, Retriever, TokenBudget
from kvweave.decode.shared_state import SharedState
from kvweave.ops.partial_attention import PartialAttention


class WholeText(ClusterRetriever):
    """Runs of consecutive entries, as long as a cluster may be; every step attends to all of them."""

    first_clusters = 1

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Write entries (G, n, D) in their order."""
        entry_format, longest = self.store.entry_format, self.shared.clusters.max_entries
        if self.empty and entry_format.storage != "exact":
            self.centre = keys.float().mean(1).cpu()
        stored = self.without_centre(keys)
        for head in range(keys.shape[0]):
            entries = entry_format.encode(stored[head], values[head])  # one head at a time in memory
            for run in entries.split(longest):
                self.store.create(self.layer, head, run)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Append entries (G, n, D) to the last run, and begin others where it is full."""
        if self.empty:
            self.fill(keys, values, None)
            return
        longest = self.shared.clusters.max_entries
        for head, entries in enumerate(self.store.entry_format.encode(self.without_centre(keys), values)):
            for entry in entries:
                last = int(self.table.count[head]) - 1
                if self.table.sizes[head, last] < longest:
                    self.store.append(self.layer, head, last, entry)
                else:
                    self.store.create(self.layer, head, entry[None])

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Attend to everything, which is within a budget of everything."""
        if self.empty:
            return 0
        sizes = self.table.sizes
        self.store.start_layer(self.layer)
        found = self.select(torch.from_numpy(sizes > 0).float() - 0.5, sizes, np.full(len(sizes), limit))
        self.attend_selected(attention, self.batches(), self.attend_whole)
        return int(found.sum())


def outlined_or_whole(layer: int, shared: SharedState, hooks: CacheHooks) -> Retriever:
    """Return the retriever of kvweave's strategy: with outlines, unless every step attends to everything."""
    kind = WholeText if shared.settings.kv_budget == 1 else OutlinedClusters
    return kind(layer, shared, hooks)
