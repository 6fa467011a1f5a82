"""Clusters that are known by their centroids alone (DynaKV §2.1): how they are filled, found, and attended to.

Strategies derive from `CentroidClusters` and define how new entries join clusters. Tensor letters: G KV heads, n entries,
H query heads, C clusters, D head width, E bytes of an entry.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.retrieval import (
    ClusterRetriever,
    Portion,
    score_clusters,
    valid_numbers,
    write_order,
)
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.settings import ClusterSettings, OffloadSettings, raise_if_invalid
from kvweave.decode.store.cluster_store import ClusterStore
from kvweave.decode.strategy import CacheHooks, SharedState, TokenBudget, page_file, token_budget
from kvweave.models.support import Geometry
from kvweave.ops.kmeans import k_means, members, nearest
from kvweave.ops.partial_attention import PartialAttention
from kvweave_lab.strategies.buffers import BufferedEntries
from kvweave_lab.strategies.centroids import Centroids


@dataclass(frozen=True, slots=True)
class CentroidSettings(ClusterSettings):
    """How entries are clustered where clusters are known by their centroids: twice the size of outlined ones, as a centroid says less.

    Args:
        spread: of `dynakv`: c in τ = c · mean; a cluster may vary up to c times the mean variance of its head's first clusters. The
            paper leaves c open.
        candidates: retrieve clusters until they hold this many times the attended entries, then attend to the best of them. 1
            attends to whole clusters. None uses the strategy's default.
        buffer_entries: of `dynakv`: how many new entries of flagged clusters each head buffers until the cluster is in memory
            (Bmax, the paper's 16).
    """

    mean_entries: int = 32
    max_entries: int = 128
    spread: float = 1.5
    candidates: float | None = None
    buffer_entries: int = 16

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)
        raise_if_invalid(
            (
                self.candidates is None or 1 <= self.candidates < math.inf,
                f"candidates is {self.candidates}; retrieved clusters hold at least 1 times the attended entries",
            ),
            (self.buffer_entries >= 0, f"buffer_entries is {self.buffer_entries}; it cannot be negative"),
            (0 < self.spread < math.inf, f"spread is {self.spread}; it must be a number above 0"),
        )


class Variances:
    """Mean squared distances of clusters' keys to their centroids, updated incrementally (DynaKV §4.2); (G, C), C grows as needed."""

    def __init__(self, heads: int) -> None:
        self.of: NDArray[np.float64] = np.zeros((heads, 0), np.float64)

    def put(self, head: int, cluster: int, variance: float) -> None:
        """Set the variance of an old or new cluster."""
        if cluster >= self.of.shape[1]:
            more = max(64, cluster + 1 - self.of.shape[1])
            self.of = np.pad(self.of, ((0, 0), (0, more)))
        self.of[head, cluster] = variance

    def with_one_more(self, head: int, cluster: int, size: int, squared_distance: float) -> float:
        """Return the variance of a cluster of `size` keys with one more, at this squared distance from its centroid."""
        grown = size * self.of[head, cluster] + size / (size + 1) * squared_distance
        return float(grown / (size + 1))


class CentroidClusters(ClusterRetriever):
    """A query attends to the clusters with the best centroids, or to their best entries.

    `default_candidates` is the strategy's ratio of entries in retrieved clusters to attended entries.
    """

    first_clusters = 4
    default_candidates = 1.0

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        super().__init__(layer, shared, hooks)
        assert isinstance(shared.index, Centroids)
        self.centroids = shared.index
        given = shared.clusters
        self.clusters = (
            given
            if isinstance(given, CentroidSettings)
            else CentroidSettings(given.mean_entries, given.max_entries)
        )
        self.buffer = BufferedEntries(self.table.heads, shared.store.entry_format.entry_bytes)
        self.variances = Variances(self.table.heads)
        self.thresholds: np.ndarray[tuple[int], np.dtype[np.float64]] = np.zeros(self.table.heads)
        self.candidates = self.clusters.candidates or self.default_candidates

    # Defined by strategies

    @abstractmethod
    def insert(self, keys: Tensor, entries: Tensor, budget: TokenBudget) -> None:
        """Insert one entry per head: keys (G, D) float32, entries (G, E)."""

    def finish_deferred(self, budget: TokenBudget) -> None:
        """Do what the strategy defers until the selected clusters are in memory; by default nothing."""
        return

    # The Retriever interface

    @property
    def resident_bytes(self) -> int:
        """Memory of buffered entries."""
        return self.buffer.resident_bytes

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Cluster entries (G, n, D) and write them; clusters that the queries (H, T, D) retrieve together are neighbours."""
        points = keys.float().cpu()
        settings, clustering = self.shared.settings, self.clusters
        if self.empty and self.store.entry_format.storage != "exact":
            self.centre = points.mean(1)
        stored = self.without_centre(keys)
        assigned = k_means(points, -(-keys.shape[1] // clustering.mean_entries))
        largest = clustering.max_entries
        clusters = [members(points[head], assigned[head], largest) for head in range(keys.shape[0])]
        limit = self.candidates * token_budget(settings, keys.shape[1]).total
        order = write_order(points, clusters, queries, int(min(limit, keys.shape[1])))
        more = max(map(len, clusters))
        self.reserve(clusters=more, rows=0)
        self.centroids.make_room(self.layer, more)
        for head, own in enumerate(clusters):
            first = int(self.table.count[head])
            entries = self.store.entry_format.encode(
                stored[head], values[head]
            )  # one head at a time in memory
            for number in order[head]:
                self.create_cluster(head, points[head, own[number]], entries[own[number]])
            if first == 0:
                created = slice(0, int(self.table.count[head]))
                sizes, variances = self.table.sizes[head, created], self.variances.of[head, created]
                self.thresholds[head] = clustering.spread * np.average(variances, weights=sizes)
        self.centroids.release(self.layer)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Insert entries (G, n, D) one after another; the first ones form clusters."""
        if self.empty:
            self.fill(keys, values, None)
            return
        entries = self.store.entry_format.encode(self.without_centre(keys), values)  # (G, n, E)
        points = keys.float().cpu()
        for number in range(keys.shape[1]):
            self.reserve(clusters=0, rows=keys.shape[0])
            self.insert(points[:, number], entries[:, number], budget)

    def prefetch_index(self) -> None:
        """Start reading the layer's centroids."""
        if not self.empty:
            self.reserve(clusters=0, rows=0)
            self.centroids.prefetch(self.layer)

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Attend to buffered entries and to the best clusters, `limit` entries per head in all."""
        attended = self._attend_buffered(attention)
        if self.empty:
            return attended
        self.prefetch_index()
        centroids = self.centroids.get(self.layer)
        sizes = self.table.sizes[:, : centroids.shape[1]]
        scores = score_clusters(attention.query.cpu(), centroids, sizes, attention.softcap)
        limits = np.maximum(limit - self.buffer.count, 0)
        self.store.start_layer(self.layer)
        few_rows = attention.query.shape[1] <= attention.query.shape[2]
        candidates = self.candidates if few_rows else 1.0  # with more rows, logits would outweigh the entries
        candidate_limits = np.minimum(limits * candidates, sizes.sum(1)).astype(np.int64)
        found = self.select(scores, sizes, candidate_limits)
        batches = self.batches()
        if len(batches) > 1 and (found > limits).any():
            # Candidates that do not fit at once would be read twice: to be ranked, and to be attended to.
            found = self.select(scores, sizes, limits)
            batches = self.batches()
        entries = np.minimum(found, limits)
        ranked = bool((found > limits).any())
        best = partial(self._attend_top_entries, limits=entries) if ranked else self.attend_whole
        self.attend_selected(attention, batches, best)
        return attended + int(entries.sum())

    def finish_pass(self, budget: TokenBudget) -> None:
        self.finish_deferred(budget)
        self.centroids.release(self.layer)

    # For strategies

    def create_cluster(self, head: int, keys: Tensor, entries: Tensor) -> int:
        """Write a new cluster of keys (n, D) float32 and their entries (n, E); return its number."""
        self.reserve(clusters=1, rows=1)
        cluster = self.store.create(self.layer, head, entries)
        self.describe(head, cluster, keys)
        return cluster

    def describe(self, head: int, cluster: int, keys: Tensor) -> None:
        """Set centroid and variance of a cluster that holds exactly these keys (n, D)."""
        centroid = keys.mean(0)
        variance = float((keys - centroid).square().sum(-1).mean())
        self.centroids.put(self.layer, head, cluster, centroid)
        self.variances.put(head, cluster, variance)

    def buffer_entry(self, head: int, owner: int, entry: Tensor) -> None:
        """Buffer a copy of an entry (E,) for a cluster; all heads may change a centroid before more is reserved."""
        self.reserve(clusters=0, rows=self.table.heads, buffer_bytes=self.buffer.growth_bytes(head))
        self.buffer.add(head, owner, entry)

    def reserve(self, clusters: int, rows: int, buffer_bytes: int = 0) -> None:
        """Reserve memory for new clusters, changed centroid rows, and the growth of the buffer.

        It holds until the next call: what an earlier one reserved, and has not been used, is given up.
        """
        more_bytes = self.centroids.bytes_to_put(self.layer, clusters, rows) + buffer_bytes
        if more_bytes:
            self.hooks.reserve_memory(more_bytes)

    def nearest_clusters(self, keys: Tensor) -> list[tuple[int, float]]:
        """Return for one key per head (G, D) float32 the nearest cluster and the squared distance to its centroid."""
        centroids = self.centroids.get(self.layer)  # (G, C, D)
        columns = Tensor(self.table.sizes[:, : centroids.shape[1]] > 0).bool()
        found = nearest(keys[:, None], centroids, columns)  # (G, 1)
        index = found[..., None].expand(-1, -1, keys.shape[1])
        distances = (centroids.gather(1, index)[:, 0] - keys).square().sum(-1)
        return list(zip(found[:, 0].tolist(), distances.tolist(), strict=True))

    def join_cluster(
        self, head: int, cluster: int, key: Tensor, entry: Tensor, squared_distance: float
    ) -> None:
        """Append an entry (E,) with its key (D,) to a cluster whose centroid is at this squared distance."""
        size = int(self.table.sizes[head, cluster])
        variance = self.variances.with_one_more(head, cluster, size, squared_distance)
        self.store.append(self.layer, head, cluster, entry)
        centroid = self.centroids.get(self.layer)[head, cluster]
        self.variances.put(head, cluster, variance)
        self.centroids.put(self.layer, head, cluster, centroid + (key - centroid) / (size + 1))

    # Attention

    def _attend_buffered(self, attention: PartialAttention) -> int:
        entries, valid = self.buffer.padded()
        if entries.shape[1]:
            keys, values = self.store.entry_format.decode(entries)
            device = attention.query.device
            attention.add(self.with_centre(keys).to(device), values.to(device), valid.to(device))
        return int(self.buffer.count.sum())

    def _attend_top_entries(
        self, attention: PartialAttention, batch: list[Portion], *, limits: NDArray[np.int64]
    ) -> None:
        """Attend to the `limits` (G,) heaviest entries of loaded clusters."""
        device = attention.query.device
        all_numbers, all_logits = [], []
        for portion in batch:
            numbers, counts = self.store.locate(self.layer, portion)
            logits = attention.logits(self.with_centre(self.store.keys(numbers)).to(device))  # (G, R, n)
            hidden = ~valid_numbers(numbers, counts)[:, None]
            all_numbers.append(numbers)
            all_logits.append(logits.masked_fill_(hidden.to(device), float("-inf")))
        logits, numbers = torch.cat(all_logits, dim=-1), torch.cat(all_numbers, dim=-1)
        best, valid = top_entries(logits, attention.log_mass, limits)
        logits = logits.gather(2, best[:, None].expand(-1, logits.shape[1], -1))
        logits.masked_fill_(~valid[:, None], float("-inf"))
        numbers = numbers.gather(1, best.to(numbers.device))
        portion_entries = self.shared.portion_pages * self.store.entry_format.page_entries
        for some, own in zip(
            numbers.split(portion_entries, 1), logits.split(portion_entries, 2), strict=True
        ):
            attention.add_logits(own, self.store.values(some).to(device))


def top_entries(logits: Tensor, log_mass: Tensor, limits: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return indices (G, k) of each head's `limits` (G,) heaviest entries, unordered, and a mask (G, k) of valid ones.

    Weights are summed over the rows that share a head.

    Args:
        logits: (G, R, n), −inf for hidden entries; each head has at least its limit of visible ones.
        log_mass: (G, R), of everything else that is attended to.
        limits: (G,).
    """
    largest = logits.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    shares = (logits - largest).exp()
    total = torch.logaddexp(shares.sum(-1).log() + largest[..., 0], log_mass)  # (G, R)
    scale = (largest[..., 0] - total).exp().nan_to_num(0.0, 0.0)  # a row that sees nothing counts for nothing
    weights = (scale[:, None] @ shares)[:, 0]  # (G, n)
    weights = weights.masked_fill(logits[:, 0] == float("-inf"), -1.0)
    best = torch.zeros(len(limits), int(limits.max()), dtype=torch.long, device=logits.device)
    for head, count in enumerate(limits.tolist()):
        best[head, :count] = weights[head].topk(count, sorted=False).indices
    valid = torch.arange(best.shape[1]) < torch.from_numpy(limits)[:, None]
    return best, valid.to(logits.device)


def centroids_of(
    geometry: Geometry,
    settings: OffloadSettings,
    store: ClusterStore,
    counts: DecodeCounts,
    kind: type[Centroids] = Centroids,
) -> Centroids:
    """Return the centroids of an empty text, in an unnamed file beside that of its clusters."""
    entry_format = store.entry_format
    file = page_file(None, settings, entry_format, counts)
    numbers = 2 * entry_format.page_entries * entry_format.width
    split_bytes = store.pages.largest_pages * (entry_format.page_bytes + 4 * numbers)
    return kind(geometry.layers, geometry.kv_heads, geometry.head_width, file, split_bytes)
