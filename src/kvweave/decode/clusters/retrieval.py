"""Retrieval of one layer's entries by clusters: fill from a prompt, select by queries, attend.

Strategies derive from `ClusterRetriever` and define how new entries join clusters. Tensor letters: G KV heads, n entries,
H query heads, C clusters, D head width, E bytes of an entry.
"""

from abc import ABC, abstractmethod
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.cluster_table import ClusterTable, layer_keys
from kvweave.decode.clusters.buffers import BufferedEntries
from kvweave.decode.clusters.selection import score_clusters, select_clusters, top_entries
from kvweave.decode.disk.layout import co_retrievals, neighbour_order
from kvweave.decode.retriever import CacheHooks, Retriever, TokenBudget
from kvweave.decode.shared_state import SharedState
from kvweave.ops.kmeans import k_means, nearest, split_in_two
from kvweave.ops.partial_attention import PartialAttention

FIRST_CLUSTERS = 4
"""Clusters with which a text without a prompt starts, if the budget lets that many entries stay in the window."""

Portion = list[NDArray[np.int64]]
"""Selected clusters of each head that are attended to together."""


class ClusterRetriever(Retriever, ABC):
    """Entries of one layer in clusters (DynaKV §2.1): a query attends to the best clusters, or to their best entries.

    Rounded entries hold keys without `centre`, the mean of each head's first keys (G, D) float32. A channel that is large in every
    token, as the bias of a key projection makes it, would leave the others no levels (KIVI, arXiv 2402.02750).

    `default_candidates` is the strategy's ratio of entries in retrieved clusters to attended entries.
    """

    default_candidates = 1.0

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        self.layer = layer
        self.shared = shared
        self.hooks = hooks
        self.store = shared.store
        self.table: ClusterTable = shared.store.tables[layer]
        heads = self.table.heads
        self.buffer = BufferedEntries(heads, shared.store.entry_format.entry_bytes)
        self.centre: Tensor | None = None
        self.thresholds: np.ndarray[tuple[int], np.dtype[np.float64]] = np.zeros(heads)
        self.selected: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in range(heads)]
        self.candidates = shared.settings.clusters.candidates or self.default_candidates

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
        return self.buffer.resident_bytes

    @property
    def empty(self) -> bool:
        return not self.table.count.any()

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Accept all; without clusters none, until there are enough entries for the first ones."""
        if not self.empty:
            return count
        settings = self.shared.settings
        enough = FIRST_CLUSTERS * settings.clusters.mean_entries
        allowed = max(1, budget.remaining(settings.sinks + budget.window))
        return count if count >= min(enough, allowed) else 0

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Cluster entries (G, n, D) and write them; clusters that the queries (H, T, D) retrieve together are neighbours."""
        points = keys.float().cpu()
        settings = self.shared.settings
        if self.empty and self.store.entry_format.storage != "exact":
            self.centre = points.mean(1)
        stored = self._without_centre(keys)
        assigned = k_means(points, -(-keys.shape[1] // settings.clusters.mean_entries))
        clusters = [self._clusters(points[head], assigned[head]) for head in range(keys.shape[0])]
        order = self._write_order(points, clusters, queries)
        more = max(map(len, clusters))
        self.reserve(clusters=more, rows=0)
        self.shared.centroids.make_room(self.layer, more)
        for head, own in enumerate(clusters):
            first = int(self.table.count[head])
            entries = self.store.entry_format.encode(
                stored[head], values[head]
            )  # one head at a time in memory
            for number in order[head]:
                self.create_cluster(head, points[head, own[number]], entries[own[number]])
            if first == 0:
                created = slice(0, int(self.table.count[head]))
                sizes, variances = self.table.sizes[head, created], self.table.variances[head, created]
                self.thresholds[head] = settings.clusters.spread * np.average(variances, weights=sizes)
        self.shared.centroids.release(self.layer)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Insert entries (G, n, D) one after another; the first ones form clusters."""
        if self.empty:
            self.fill(keys, values, None)
            return
        entries = self.store.entry_format.encode(self._without_centre(keys), values)  # (G, n, E)
        points = keys.float().cpu()
        for number in range(keys.shape[1]):
            self.reserve(clusters=0, rows=keys.shape[0])
            self.insert(points[:, number], entries[:, number], budget)

    def prefetch_centroids(self) -> None:
        if not self.empty:
            self.reserve(clusters=0, rows=0)
            self.shared.centroids.prefetch(self.layer)

    def prefetch(self) -> None:
        """Start reading the clusters that the last pass selected."""
        self.store.prefetch(layer_keys(self.layer, self.selected))

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Attend to buffered entries and to the best clusters, `limit` entries per head in all."""
        attended = self._attend_buffered(attention)
        if self.empty:
            return attended
        self.prefetch_centroids()
        centroids = self.shared.centroids.get(self.layer)
        sizes = self.table.sizes[:, : centroids.shape[1]]
        scores = score_clusters(attention.query.cpu(), centroids, sizes, attention.softcap)
        limits = np.maximum(limit - self.buffer.count, 0)
        self.store.start_layer(self.layer)
        few_rows = attention.query.shape[1] <= attention.query.shape[2]
        candidates = self.candidates if few_rows else 1.0  # with more rows, logits would outweigh the entries
        candidate_limits = np.minimum(limits * candidates, sizes.sum(1)).astype(np.int64)
        found = self._select(scores, sizes, candidate_limits)
        batches = self._batches()
        if len(batches) > 1 and (found > limits).any():
            # Candidates that do not fit at once would be read twice: to be ranked, and to be attended to.
            found = self._select(scores, sizes, limits)
            batches = self._batches()
        entries = np.minimum(found, limits)
        self._attend_selected(attention, batches, entries, ranked=bool((found > limits).any()))
        return attended + int(entries.sum())

    def finish_pass(self, budget: TokenBudget) -> None:
        self.finish_deferred(budget)
        self.shared.centroids.release(self.layer)

    # For strategies

    def with_centre(self, keys: Tensor, head: int | None = None) -> Tensor:
        """Return keys (G, n, D), or those of one head (n, D), from those of its entries, which may lack their mean."""
        if self.centre is None:
            return keys
        return keys + (self.centre[:, None] if head is None else self.centre[head]).to(keys)

    def create_cluster(self, head: int, keys: Tensor, entries: Tensor) -> int:
        """Write a new cluster of keys (n, D) float32 and their entries (n, E); return its number."""
        self.reserve(clusters=1, rows=1)
        cluster = self.store.create(self.layer, head, entries)
        self.describe(head, cluster, keys)
        return cluster

    def describe(self, head: int, cluster: int, keys: Tensor) -> None:
        """Set centroid, size and variance of a cluster that holds exactly these keys (n, D)."""
        centroid = keys.mean(0)
        variance = float((keys - centroid).square().sum(-1).mean())
        self.shared.centroids.put(self.layer, head, cluster, centroid)
        self.table.set_statistics(head, cluster, keys.shape[0], variance)

    def buffer_entry(self, head: int, owner: int, entry: Tensor) -> None:
        """Buffer a copy of an entry (E,) for a cluster; all heads may change a centroid before more is reserved."""
        self.reserve(clusters=0, rows=self.table.heads, buffer_bytes=self.buffer.growth_bytes(head))
        self.buffer.add(head, owner, entry)

    def reserve(self, clusters: int, rows: int, buffer_bytes: int = 0) -> None:
        """Reserve memory for new clusters, changed centroid rows, and the growth of the buffer.

        It holds until the next call: what an earlier one reserved, and has not been used, is given up.
        """
        more_bytes = self.shared.centroids.growth_bytes(self.layer, clusters, rows) + buffer_bytes
        if more_bytes:
            self.hooks.reserve_memory(more_bytes)

    def nearest_clusters(self, keys: Tensor) -> list[tuple[int, float]]:
        """Return for one key per head (G, D) float32 the nearest cluster and the squared distance to its centroid."""
        centroids = self.shared.centroids.get(self.layer)  # (G, C, D)
        columns = Tensor(self.table.sizes[:, : centroids.shape[1]] > 0).bool()
        found = nearest(keys[:, None], centroids, columns)  # (G, 1)
        index = found[..., None].expand(-1, -1, keys.shape[1])
        distances = (centroids.gather(1, index)[:, 0] - keys).square().sum(-1)
        return list(zip(found[:, 0].tolist(), distances.tolist(), strict=True))

    def join_cluster(
        self, head: int, cluster: int, key: Tensor, entry: Tensor, squared_distance: float
    ) -> None:
        """Append an entry (E,) with its key (D,) to a cluster whose centroid is at this squared distance."""
        table, centroids = self.table, self.shared.centroids
        variance = table.variance_with(head, cluster, squared_distance)
        self.store.append(self.layer, head, cluster, entry)
        centroid = centroids.get(self.layer)[head, cluster]
        size = int(table.sizes[head, cluster])
        table.variances[head, cluster] = variance
        centroids.put(self.layer, head, cluster, centroid + (key - centroid) / size)

    def _clusters(self, keys: Tensor, assigned: Tensor) -> list[Tensor]:
        """Return the indices of each cluster's keys, given keys (n, D) and their assignment (n,) by k-means.

        Empty clusters are left out, and those that are too large are split.
        """
        order = assigned.argsort(stable=True)
        pending = [own for own in order.split(torch.bincount(assigned).tolist()) if own.numel()]
        clusters: list[Tensor] = []
        while pending:
            own = pending.pop()
            if own.numel() <= self.shared.settings.clusters.max_entries:
                clusters.append(own)
                continue
            side = split_in_two(keys[own], own.numel() - 1)
            pending += [own[~side], own[side]]
        return clusters[::-1]

    def _write_order(
        self, keys: Tensor, clusters: list[list[Tensor]], queries: Tensor | None
    ) -> list[list[int]]:
        """Return for each head the order in which its clusters are written: those retrieved together become neighbours.

        `keys` are (G, n, D) float32, `clusters` the indices of each cluster's keys per head. Each row of `queries` (H, T, D)
        counts as one retrieval.
        """
        if queries is None or queries.shape[1] == 0:
            return [list(range(len(own))) for own in clusters]
        stored, budget = keys.shape[1], self.shared.settings.kv_budget
        limit = int(min(self.candidates * (budget * stored if budget <= 1 else budget), stored))
        grouped = queries.float().cpu().unflatten(0, (keys.shape[0], -1))  # (G, H/G, T, D)
        orders = []
        for head, own in enumerate(clusters):
            centroids = torch.stack([keys[head, part].mean(0) for part in own])  # (C, D)
            sizes = np.array([part.numel() for part in own])
            retrieved = _retrievals(grouped[head], centroids, sizes, limit)
            orders.append(neighbour_order(co_retrievals(retrieved)))
        return orders

    def _without_centre(self, keys: Tensor) -> Tensor:
        return keys if self.centre is None else keys - self.centre[:, None].to(keys.device)

    # Attention

    def _attend_buffered(self, attention: PartialAttention) -> int:
        entries, valid = self.buffer.padded()
        if entries.shape[1]:
            keys, values = self.store.entry_format.decode(entries)
            device = attention.query.device
            attention.add(self.with_centre(keys).to(device), values.to(device), valid.to(device))
        return int(self.buffer.count.sum())

    def _select(
        self, scores: Tensor, sizes: NDArray[np.int64], limits: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Select clusters of at most `limits` (G,) entries, sorted by their place on disk; return their entries (G,)."""
        selected = select_clusters(scores, sizes, limits)
        homes = self.table.homes
        self.selected = [
            own[np.argsort(homes[head, own], kind="stable")] for head, own in enumerate(selected)
        ]
        return np.array([sizes[head, own].sum() for head, own in enumerate(self.selected)])

    def _batches(self) -> list[list[Portion]]:
        """Divide the selected clusters into batches that fit into memory, and these into portions."""
        heads = self.table.heads
        capacity = self.store.capacity_pages()
        fitting = (
            capacity // heads - self.store.pages.largest_pages + 1
        )  # a portion ends with a whole cluster
        portion_pages = max(1, min(self.shared.portion_pages, capacity // (2 * heads), fitting))
        portions: dict[int, Portion] = defaultdict(lambda: [np.zeros(0, np.int64)] * heads)
        pages: dict[int, int] = defaultdict(int)  # of each portion
        for head, clusters in enumerate(self.selected):
            if not clusters.size:
                continue
            ends = np.cumsum(self.store.entry_format.page_count(self.table.sizes[head, clusters]))
            numbers = (ends - 1) // portion_pages
            first = np.flatnonzero(np.diff(numbers, prepend=-1))  # of each portion
            for own, number, count in zip(
                np.split(clusters, first)[1:],
                numbers[first].tolist(),
                np.diff(ends[np.append(first[1:], len(ends)) - 1], prepend=0).tolist(),
                strict=True,
            ):
                portions[number][head] = own
                pages[number] += count
        batches: list[list[Portion]] = [[]]  # at least one, even if it is empty
        room = capacity
        for number in sorted(portions):
            if batches[-1] and pages[number] > room:
                batches.append([])
                room = capacity
            batches[-1].append(portions[number])
            room -= pages[number]
        return batches

    def _attend_selected(
        self,
        attention: PartialAttention,
        batches: list[list[Portion]],
        limits: NDArray[np.int64],
        *,
        ranked: bool,
    ) -> None:
        """Load and attend to the selected clusters: to all entries, or if `ranked` to the `limits` (G,) best ones."""
        store, counts = self.store, self.shared.counts
        keys = layer_keys(self.layer, self.selected)
        counts.retrieved += len(keys)
        hits, hits_ahead = store.page_cache.count_hits(keys)
        counts.hits += hits
        counts.hits_ahead += hits_ahead
        for batch in batches:
            own = np.concatenate([layer_keys(self.layer, portion) for portion in batch] or [keys])
            store.load(own)
            if batch is batches[-1]:
                self.hooks.on_reads_done()
            if ranked:
                self._attend_top_entries(attention, batch, limits)
            else:
                for portion in batch:
                    self._attend_portion(attention, portion)
            store.release(own)

    def _attend_portion(self, attention: PartialAttention, portion: Portion) -> None:
        device = attention.query.device
        numbers, counts = self.store.locate(self.layer, portion)
        keys, values = self.with_centre(self.store.keys(numbers)), self.store.values(numbers)
        attention.add(keys.to(device), values.to(device), _valid(numbers, counts)[:, None].to(device))

    def _attend_top_entries(
        self, attention: PartialAttention, batch: list[Portion], limits: NDArray[np.int64]
    ) -> None:
        """Attend to the `limits` (G,) heaviest entries of loaded clusters."""
        device = attention.query.device
        all_numbers, all_logits = [], []
        for portion in batch:
            numbers, counts = self.store.locate(self.layer, portion)
            logits = attention.logits(self.with_centre(self.store.keys(numbers)).to(device))  # (G, R, n)
            hidden = ~_valid(numbers, counts)[:, None]
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


def _valid(numbers: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Return which of the numbers (G, n) from `locate` belong to a head, given the heads' counts (G,)."""
    return torch.arange(numbers.shape[1]) < torch.from_numpy(counts)[:, None]


def _retrievals(queries: Tensor, centroids: Tensor, sizes: NDArray[np.int64], limit: int) -> Tensor:
    """Return which clusters each row of queries (H/G, T, D) would retrieve, (T, C) bool."""
    retrieved = torch.zeros(queries.shape[1], len(centroids), dtype=torch.bool)
    scaled = queries / queries.shape[-1] ** 0.5
    for row in range(queries.shape[1]):
        scores = score_clusters(scaled[None, :, row], centroids[None], sizes[None], None)
        retrieved[row, select_clusters(scores, sizes[None], np.array([limit]))[0]] = True
    return retrieved
