"""How new entries join clusters, and when clusters are split (DynaKV §4)."""

import torch
from torch import Tensor

from kvweave.decode.clusters.centroid import CentroidClusters
from kvweave.decode.retriever import TokenBudget
from kvweave.ops.kmeans import split_in_two


class AdaptiveClusters(CentroidClusters):
    """Clusters that follow the keys: a new entry joins the nearest one, and clusters that grow too wide are split.

    Paper: DynaKV §4, Algorithm 1. A cluster is flagged if a new entry would raise its variance above the head's
    threshold, or its size above the largest. A flagged cluster is split once it is in memory. Until then its new entries
    are buffered and attended to in every step. If a head's buffer is full, the cluster with most buffered entries is read
    and split.

    Differs from the paper: retrieved clusters hold more entries than may be attended to, and the best of these are
    attended to. The buffer belongs to a head, as thresholds do. The variance is tentative until an entry has joined. A
    cluster counts as in memory whenever it is resident, not only if this step retrieved it.
    """

    default_candidates = 1.8

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Append, buffer or split, by the variance that the new entry would cause."""
        for head, (cluster, distance) in enumerate(self.nearest_clusters(keys)):
            if self._fits(head, cluster, distance):
                self.join_cluster(head, cluster, keys[head], entries[head], distance)
                continue
            self.table.flagged[head, cluster] = True
            self.buffer_entry(head, cluster, entries[head])
            if self.store.in_memory(self.layer, head, cluster):
                self._split(head, cluster)
            else:
                self._drain_buffer(head, budget.buffer)

    def finish_deferred(self, budget: TokenBudget) -> None:
        """Split flagged clusters that are in memory now, and more if the buffer has shrunk with the budget."""
        for head in range(self.table.heads):
            for cluster in self.buffer.owners(head):
                if self.store.in_memory(self.layer, head, cluster):
                    self._split(head, cluster)
            self._drain_buffer(head, budget.buffer)

    def _fits(self, head: int, cluster: int, distance: float) -> bool:
        """Return whether a cluster is not flagged, and stays within its limits with an entry at this squared distance."""
        return bool(
            not self.table.flagged[head, cluster]
            and self.table.sizes[head, cluster] < self.shared.settings.clusters.max_entries
            and self.table.variance_with(head, cluster, distance) <= self.thresholds[head]
        )

    def _drain_buffer(self, head: int, limit: int) -> None:
        """Read and split clusters until at most `limit` entries are buffered."""
        while self.buffer.count[head] > limit:
            self.shared.counts.forced_splits += 1
            self._split(head, self.buffer.fullest(head))

    def _split(self, head: int, cluster: int) -> None:
        """Split a cluster with its buffered entries: the larger half stays, the other gets a home of its own."""
        store, counts, entry_format = self.store, self.shared.counts, self.store.entry_format
        self.reserve(clusters=1, rows=2 + self.table.heads)  # two halves, and a joined cluster per head
        before = counts.bytes_read
        store.load([(self.layer, head, cluster)])
        counts.split_bytes_read += counts.bytes_read - before
        stored = store.entries(self.layer, head, cluster)
        entries = torch.cat([stored, self.buffer.pop(head, cluster)])  # (n, E)
        store.page_cache.unpin_all()
        keys = self.with_centre(entry_format.decode(entries)[0].float(), head)
        count = entries.shape[0]
        side = split_in_two(keys, max(self.shared.settings.clusters.max_entries, (count + 1) // 2))
        if 2 * int(side.sum()) > count:
            side = ~side
        other = store.new_cluster(self.layer, head)
        for number, part in ((cluster, ~side), (other, side)):
            store.replace(self.layer, head, number, entries[part])
            self.describe(head, number, keys[part])
        counts.splits += 1
        counts.moved_bytes += entry_format.page_count(int(side.sum())) * entry_format.page_bytes
