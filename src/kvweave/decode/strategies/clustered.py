"""Clusters that follow the keys: a newcomer joins the nearest, and what has become too wide is split (DynaKV §4).

Paper: DynaKV, Algorithm 1. A cluster that would vary beyond its head's threshold, or grow beyond the largest size, is
flagged; it is split as soon as it is in memory, and until then its newcomers wait, attended to in every step. When a
head's buffer is full, the cluster that most wait for is read for its split.

Differs from the paper: of the clusters retrieved, which hold more than may be attended to, the best entries are attended
to; the buffer is a head's, as the thresholds are; the variance is tentative until an entry has
joined; a cluster counts as in memory wherever it is resident, not only when this step retrieved it.
"""

import torch
from torch import Tensor

from kvweave.decode.clusters.buffers import UNGROUPED
from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.retriever import TokenBudget
from kvweave.ops.kmeans import halve, k_means, nearest


def nearest_clusters(retriever: ClusterRetriever, keys: Tensor) -> list[tuple[int, float]]:
    """For one key per head (G, D) float32 the nearest cluster of the head and the squared distance to its centroid."""
    centroids = retriever.parts.representatives.of(retriever.layer)  # (G, C, D)
    columns = Tensor(retriever.table.sizes[:, : centroids.shape[1]] > 0).bool()
    found = nearest(keys[:, None], centroids, columns)  # (G, 1)
    index = found[..., None].expand(-1, -1, keys.shape[1])
    distances = (centroids.gather(1, index)[:, 0] - keys).square().sum(-1)
    return list(zip(found[:, 0].tolist(), distances.tolist(), strict=True))


def join(
    retriever: ClusterRetriever, head: int, cluster: int, key: Tensor, entry: Tensor, squared_distance: float
) -> None:
    """Add an entry (E,) with its key (D,) to a cluster whose centroid is so far away."""
    table, representatives = retriever.table, retriever.parts.representatives
    variance = table.tentative(head, cluster, squared_distance)
    retriever.store.append(retriever.layer, head, cluster, entry)
    centroid = representatives.of(retriever.layer)[head, cluster]
    size = int(table.sizes[head, cluster])
    table.variances[head, cluster] = variance
    representatives.put(retriever.layer, head, cluster, centroid + (key - centroid) / size)


class Adaptive(ClusterRetriever):
    """Append, buffer or split, by the variance that the newcomer would bring."""

    own_candidates = 1.8

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: TokenBudget) -> None:
        """Take in one entry per head."""
        for head, (cluster, distance) in enumerate(nearest_clusters(self, keys)):
            if self._stays_close(head, cluster, distance):
                join(self, head, cluster, keys[head], entries[head], distance)
                continue
            self.table.flagged[head, cluster] = True
            self.waiting.put(head, cluster, entries[head])
            immediate = self.parts.settings.clusters.split == "immediate"
            if immediate or self.store.in_memory(self.layer, head, cluster):
                self._split(head, cluster)
            else:
                self._hold_to(head, allowed.buffer)

    def after_attention(self, allowed: TokenBudget) -> None:
        """Split what was flagged and is in memory by now; a budget that has shrunk splits more."""
        for head in range(self.table.heads):
            for cluster in self.waiting.owners(head):
                if self.store.in_memory(self.layer, head, cluster):
                    self._split(head, cluster)
            self._hold_to(head, allowed.buffer)

    def _stays_close(self, head: int, cluster: int, distance: float) -> bool:
        """Whether the cluster is sound and would be with an entry at this squared distance."""
        return bool(
            not self.table.flagged[head, cluster]
            and self.table.sizes[head, cluster] < self.parts.settings.clusters.max_entries
            and self.table.tentative(head, cluster, distance) <= self.thresholds[head]
        )

    def _hold_to(self, head: int, buffer: int) -> None:
        """Read and split clusters until no more entries wait than the buffer holds."""
        while self.waiting.count[head] > buffer:
            self.parts.counts.forced_splits += 1
            self._split(head, self.waiting.fullest(head))

    def _split(self, head: int, cluster: int) -> None:
        """Divide a cluster and what waits for it in two: the larger half stays, the other goes to a pool of its own."""
        counts, key = self.parts.counts, (self.layer, head, cluster)
        self.expect(clusters=1, rows=2 + self.table.heads)  # the two halves', and those that other heads join
        before = counts.bytes_read
        self.store.ensure([key])
        counts.split_bytes_read += counts.bytes_read - before
        own = self.store.entries(self.layer, head, cluster)
        entries = torch.cat([own, self.waiting.take(head, cluster)])  # (n, E)
        self.store.residents.release()
        keys = self.store.form.decode(entries)[0].float()
        count = entries.shape[0]
        side = halve(keys, max(self.parts.settings.clusters.max_entries, (count + 1) // 2))
        if 2 * int(side.sum()) > count:
            side = ~side
        other = self.store.open(self.layer, head)
        for number, part in ((cluster, ~side), (other, side)):
            self.store.replace(self.layer, head, number, entries[part])
            self.describe(head, number, keys[part])
        counts.splits += 1
        counts.moved_bytes += self.store.form.pages(int(side.sum())) * self.store.form.page_bytes


class Local(ClusterRetriever):
    """Groups each window of newcomers alone; clusters made once never change."""

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: TokenBudget) -> None:
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


class Static(ClusterRetriever):
    """Appends to the nearest cluster, whose centroid and variance follow."""

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: TokenBudget) -> None:
        """Append one entry per head."""
        for head, (cluster, distance) in enumerate(nearest_clusters(self, keys)):
            join(self, head, cluster, keys[head], entries[head], distance)
