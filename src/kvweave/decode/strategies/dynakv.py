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

from kvweave.decode.budget import Allowance
from kvweave.decode.clusters.joining import join, nearest_clusters
from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.ops.kmeans import halve


class Adaptive(ClusterRetriever):
    """Append, buffer or split, by the variance that the newcomer would bring."""

    own_candidates = 1.8

    def newcomers(self, keys: Tensor, entries: Tensor, allowed: Allowance) -> None:
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

    def after_attention(self, allowed: Allowance) -> None:
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
