"""How new entries join clusters, and when clusters are split (DynaKV §4)."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.decode.cluster_table import ClusterKey
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.store.cluster_store import ClusterStore
from kvweave.decode.strategy import CacheHooks, SharedState, Strategy, TokenBudget
from kvweave.ops.kmeans import split_in_two
from kvweave_lab.strategies.centroid import CentroidClusters, CentroidSettings, centroids_of


@dataclass(slots=True)
class SplitCounts(DecodeCounts):
    """Counters of a strategy that moves clusters.

    Attributes:
        splits, forced_splits: all splits, and those because a buffer was full.
        split_bytes_read: read for splits alone.
        moved_bytes: rewritten at another place: the half that leaves a split cluster and, in a packed layout, all pages
            after a cluster that grows.
    """

    splits: int = 0
    forced_splits: int = 0
    split_bytes_read: int = 0
    moved_bytes: int = 0


class SplittableStore(ClusterStore):
    """A store in which a cluster's entries can be replaced: both halves of a split are in memory at once."""

    @property
    def spare_pages(self) -> int:
        """Frames that a split of the largest cluster takes."""
        return 2 * self.pages.largest_pages + 2

    def in_memory(self, layer: int, head: int, cluster: int) -> bool:
        """Return whether all of a cluster is in frames, or being read into them."""
        key = (layer, head, cluster)
        return key in self.page_cache or self.pages.page_count(key) == int(key in self.tails)

    def replace(self, layer: int, head: int, cluster: int, entries: Tensor) -> None:
        """Replace a cluster's entries by others (n, E); it is in memory afterwards, its last page unwritten."""
        key = (layer, head, cluster)
        self._discard(key)
        count = entries.shape[0]
        pages = self.entry_format.page_count(count)
        self._reserve(key, pages)
        frames = self.page_cache.allocate(pages)
        self.entry_format.fill_pages(self._frames.pages, frames, entries)
        self._set_content(key, entries)
        full_pages = count // self.entry_format.page_entries
        self.pages.write_first(key, self._frames, frames[:full_pages])
        self.page_cache.insert(key, frames, unwritten=full_pages < pages)
        self.page_cache.record_update(key)

    def _discard(self, key: ClusterKey) -> None:
        self._reads.wait([key])
        if key in self.page_cache:
            self._frames.free(self.page_cache.remove(key))
        if key in self.tails:
            self._frames.free([self.tails.pop(key)])


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
    store: SplittableStore

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        super().__init__(layer, shared, hooks)
        assert isinstance(shared.counts, SplitCounts)
        self.counts = shared.counts
        self.flagged: dict[int, set[int]] = defaultdict(set)  # by head: clusters that wait to be split

    def buffer_limit(self, budget: TokenBudget) -> int:
        """Return how many entries of a head may be buffered in a step with this budget."""
        free = budget.total - self.shared.settings.sinks - budget.window
        return min(self.clusters.buffer_entries, free // 2)

    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Append, buffer or split, by the variance that the new entry would cause."""
        for head, (cluster, distance) in enumerate(self.nearest_clusters(keys)):
            if self._fits(head, cluster, distance):
                self.join_cluster(head, cluster, keys[head], entries[head], distance)
                continue
            self.flagged[head].add(cluster)
            self.buffer_entry(head, cluster, entries[head])
            if self.store.in_memory(self.layer, head, cluster):
                self._split(head, cluster)
            else:
                self._drain_buffer(head, self.buffer_limit(budget))

    def finish_deferred(self, budget: TokenBudget) -> None:
        """Split flagged clusters that are in memory now, and more if the buffer has shrunk with the budget."""
        for head in range(self.table.heads):
            for cluster in self.buffer.owners(head):
                if self.store.in_memory(self.layer, head, cluster):
                    self._split(head, cluster)
            self._drain_buffer(head, self.buffer_limit(budget))

    def _fits(self, head: int, cluster: int, distance: float) -> bool:
        """Return whether a cluster is not flagged, and stays within its limits with an entry at this squared distance."""
        size = int(self.table.sizes[head, cluster])
        return bool(
            cluster not in self.flagged[head]
            and size < self.clusters.max_entries
            and self.variances.with_one_more(head, cluster, size, distance) <= self.thresholds[head]
        )

    def _drain_buffer(self, head: int, limit: int) -> None:
        """Read and split clusters until at most `limit` entries are buffered."""
        while self.buffer.count[head] > limit:
            self.counts.forced_splits += 1
            self._split(head, self.buffer.fullest(head))

    def _split(self, head: int, cluster: int) -> None:
        """Split a cluster with its buffered entries: the larger half stays, the other gets a home of its own."""
        store, counts, entry_format = self.store, self.counts, self.store.entry_format
        self.reserve(clusters=1, rows=2 + self.table.heads)  # two halves, and a joined cluster per head
        before = counts.bytes_read
        store.load([(self.layer, head, cluster)])
        counts.split_bytes_read += counts.bytes_read - before
        stored = store.entries(self.layer, head, cluster)
        entries = torch.cat([stored, self.buffer.pop(head, cluster)])  # (n, E)
        store.page_cache.unpin_all()
        keys = self.with_centre(entry_format.decode(entries)[0].float(), head)
        count = entries.shape[0]
        side = split_in_two(keys, max(self.clusters.max_entries, (count + 1) // 2))
        if 2 * int(side.sum()) > count:
            side = ~side
        other = store.new_cluster(self.layer, head)
        for number, part in ((cluster, ~side), (other, side)):
            store.replace(self.layer, head, number, entries[part])
            self.describe(head, number, keys[part])
        self.flagged[head].discard(cluster)
        counts.splits += 1
        counts.moved_bytes += entry_format.page_count(int(side.sum())) * entry_format.page_bytes


DYNAKV = Strategy(
    AdaptiveClusters, CentroidSettings(), store=SplittableStore, index=centroids_of, counts=SplitCounts
)
