"""Strategies with clusters, which differ in how new entries join them."""

import torch
from torch import Tensor

from kvweave.decode.clusters.buffers import UNGROUPED
from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.retriever import TokenBudget
from kvweave.ops.kmeans import k_means, nearest, split_in_two


class AdaptiveClusters(ClusterRetriever):
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
        for head, (cluster, distance) in enumerate(_nearest_clusters(self, keys)):
            if self._fits(head, cluster, distance):
                _join(self, head, cluster, keys[head], entries[head], distance)
                continue
            self.table.flagged[head, cluster] = True
            self.buffer_entry(head, cluster, entries[head])
            immediate = self.shared.settings.clusters.split == "immediate"
            if immediate or self.store.in_memory(self.layer, head, cluster):
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
        entries = self._load_entries(head, cluster)  # (n, E)
        keys = entry_format.decode(entries)[0].float()
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

    def _load_entries(self, head: int, cluster: int) -> Tensor:
        """Read a cluster, and return its entries with the buffered ones, which leave the buffer."""
        counts = self.shared.counts
        before = counts.bytes_read
        self.store.load([(self.layer, head, cluster)])
        counts.split_bytes_read += counts.bytes_read - before
        stored = self.store.entries(self.layer, head, cluster)
        entries = torch.cat([stored, self.buffer.pop(head, cluster)])
        self.store.page_cache.unpin_all()
        return entries


class StaticClusters(ClusterRetriever):
    """Clusters that are never split: a new entry joins the nearest one, whose centroid and variance follow."""

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Append one entry per head."""
        for head, (cluster, distance) in enumerate(_nearest_clusters(self, keys)):
            _join(self, head, cluster, keys[head], entries[head], distance)


class LocalClusters(ClusterRetriever):
    """Clusters that never change: each window of new entries is clustered by itself."""

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Buffer one entry per head, and cluster the buffer when it is full."""
        for head in range(keys.shape[0]):
            self.buffer_entry(head, UNGROUPED, entries[head])
        clusters = self.shared.settings.clusters
        free = budget.total - self.shared.settings.sinks - budget.window
        if self.buffer.count[0] >= max(1, min(clusters.local_entries, free // 2)):
            self._cluster_buffer(clusters.mean_entries)

    def _cluster_buffer(self, mean_entries: int) -> None:
        entries = torch.stack([self.buffer.pop(head, UNGROUPED) for head in range(self.table.heads)])
        keys = self.store.entry_format.decode(entries)[0].float()  # (G, n, D)
        assigned = k_means(keys, -(-keys.shape[1] // mean_entries))
        for head in range(self.table.heads):
            for own in self._clusters(keys[head], assigned[head]):
                self.create_cluster(head, keys[head, own], entries[head, own])


def _nearest_clusters(retriever: ClusterRetriever, keys: Tensor) -> list[tuple[int, float]]:
    """Return for one key per head (G, D) float32 the nearest cluster and the squared distance to its centroid."""
    centroids = retriever.shared.centroids.get(retriever.layer)  # (G, C, D)
    columns = Tensor(retriever.table.sizes[:, : centroids.shape[1]] > 0).bool()
    found = nearest(keys[:, None], centroids, columns)  # (G, 1)
    index = found[..., None].expand(-1, -1, keys.shape[1])
    distances = (centroids.gather(1, index)[:, 0] - keys).square().sum(-1)
    return list(zip(found[:, 0].tolist(), distances.tolist(), strict=True))


def _join(
    retriever: ClusterRetriever, head: int, cluster: int, key: Tensor, entry: Tensor, squared_distance: float
) -> None:
    """Append an entry (E,) with its key (D,) to a cluster whose centroid is at this squared distance."""
    table, centroids = retriever.table, retriever.shared.centroids
    variance = table.variance_with(head, cluster, squared_distance)
    retriever.store.append(retriever.layer, head, cluster, entry)
    centroid = centroids.get(retriever.layer)[head, cluster]
    size = int(table.sizes[head, cluster])
    table.variances[head, cluster] = variance
    centroids.put(retriever.layer, head, cluster, centroid + (key - centroid) / size)
