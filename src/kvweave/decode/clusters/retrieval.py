"""Retrieval of one layer's entries by clusters: select by queries, load, attend.

Strategies derive from `ClusterRetriever` and define which clusters there are and what is known of them. `WholeText` selects all, so that
it has to know nothing. Tensor letters: G KV heads, n entries, H query heads, R query rows of a head's group, C clusters, D head width,
E bytes of an entry.
"""

from abc import ABC
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.cluster_table import ClusterTable, layer_keys
from kvweave.decode.disk.layout import co_retrievals, neighbour_order
from kvweave.decode.strategy import CacheHooks, Retriever, SharedState, TokenBudget
from kvweave.ops.attention import apply_softcap
from kvweave.ops.partial_attention import PartialAttention

Portion = list[NDArray[np.int64]]
"""Selected clusters of each head that are attended to together."""


class ClusterRetriever(Retriever, ABC):
    """Entries of one layer in clusters on the disk: a query attends to the best clusters (DynaKV §2.1).

    Rounded entries hold keys without `centre`, the mean of each head's first keys (G, D) float32. A channel that is large in every
    token, as the bias of a key projection makes it, would leave the others no levels (KIVI, arXiv 2402.02750).
    """

    first_clusters: ClassVar[int]
    """With how many clusters a text without a prompt starts, if the budget lets that many entries stay in the window."""

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        self.layer = layer
        self.shared = shared
        self.hooks = hooks
        self.store = shared.store
        self.table: ClusterTable = shared.store.tables[layer]
        self.centre: Tensor | None = None
        self.selected: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in range(self.table.heads)]

    @property
    def empty(self) -> bool:
        return not self.table.count.any()

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Accept all; without clusters none, until there are enough entries for the first ones."""
        if not self.empty:
            return count
        settings = self.shared.settings
        enough = self.first_clusters * self.shared.clusters.mean_entries
        allowed = max(1, budget.remaining(settings.sinks + budget.window))
        return count if count >= min(enough, allowed) else 0

    def prefetch(self) -> None:
        """Start reading the clusters that the last pass selected."""
        self.store.prefetch(layer_keys(self.layer, self.selected))

    def state(self) -> dict[str, Tensor]:
        """Return what is in memory alone, for `restore`."""
        found = {f"table.{name}": torch.from_numpy(array) for name, array in self.table.state().items()}
        return found if self.centre is None else found | {"centre": self.centre}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.table.restore(
            {name: array.numpy().copy() for name, array in with_prefix(state, "table.").items()}
        )
        self.centre = state.get("centre")

    # For strategies

    def with_centre(self, keys: Tensor, head: int | None = None) -> Tensor:
        """Return keys (G, n, D), or those of one head (n, D), from those of its entries, which may lack their mean."""
        if self.centre is None:
            return keys
        return keys + (self.centre[:, None] if head is None else self.centre[head]).to(keys)

    def without_centre(self, keys: Tensor) -> Tensor:
        """Return keys (G, n, D) as entries hold them."""
        return keys if self.centre is None else keys - self.centre[:, None].to(keys.device)

    def select(
        self, scores: Tensor, sizes: NDArray[np.int64], limits: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Select clusters of at most `limits` (G,) entries, sorted by their place on disk; return their entries (G,)."""
        selected = select_clusters(scores, sizes, limits)
        homes = self.table.homes
        self.selected = [
            own[np.argsort(homes[head, own], kind="stable")] for head, own in enumerate(selected)
        ]
        return np.array([sizes[head, own].sum() for head, own in enumerate(self.selected)])

    def batches(self) -> list[list[Portion]]:
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

    def attend_selected(
        self,
        attention: PartialAttention,
        batches: list[list[Portion]],
        attend: Callable[[PartialAttention, list[Portion]], None],
    ) -> None:
        """Load the selected clusters batch by batch, and call `attend` with each."""
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
            attend(attention, batch)
            store.release(own)

    def attend_whole(self, attention: PartialAttention, batch: list[Portion]) -> None:
        """Attend to all entries of loaded clusters."""
        device = attention.query.device
        for portion in batch:
            numbers, counts = self.store.locate(self.layer, portion)
            keys, values = self.with_centre(self.store.keys(numbers)), self.store.values(numbers)
            attention.add(
                keys.to(device), values.to(device), valid_numbers(numbers, counts)[:, None].to(device)
            )


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


def valid_numbers(numbers: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Return which of the numbers (G, n) from `locate` belong to a head, given the heads' counts (G,)."""
    return torch.arange(numbers.shape[1]) < torch.from_numpy(counts)[:, None]


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of the name."""
    return {name.removeprefix(prefix): own for name, own in tensors.items() if name.startswith(prefix)}


def write_order(
    keys: Tensor, clusters: list[list[Tensor]], queries: Tensor | None, limit: int
) -> list[list[int]]:
    """Return for each head the order in which its clusters are written: those retrieved together become neighbours.

    `keys` are (G, n, D) float32, `clusters` the indices of each cluster's keys per head. Each row of `queries` (H, T, D)
    counts as one retrieval of at most `limit` entries.
    """
    if queries is None or queries.shape[1] == 0:
        return [list(range(len(own))) for own in clusters]
    grouped = queries.float().cpu().unflatten(0, (keys.shape[0], -1))  # (G, H/G, T, D)
    orders = []
    for head, own in enumerate(clusters):
        centroids = torch.stack([keys[head, part].mean(0) for part in own])  # (C, D)
        sizes = np.array([part.numel() for part in own])
        retrieved = _retrievals(grouped[head], centroids, sizes, limit)
        orders.append(neighbour_order(co_retrievals(retrieved)))
    return orders


def _retrievals(queries: Tensor, centroids: Tensor, sizes: NDArray[np.int64], limit: int) -> Tensor:
    """Return which clusters each row of queries (H/G, T, D) would retrieve, (T, C) bool."""
    retrieved = torch.zeros(queries.shape[1], len(centroids), dtype=torch.bool)
    scaled = queries / queries.shape[-1] ** 0.5
    for row in range(queries.shape[1]):
        scores = score_clusters(scaled[None, :, row], centroids[None], sizes[None], None)
        retrieved[row, select_clusters(scores, sizes[None], np.array([limit]))[0]] = True
    return retrieved


# Selection by a query


def score_clusters(
    query: Tensor, centroids: Tensor, sizes: NDArray[np.int64], softcap: float | None
) -> Tensor:
    """Return the expected weight of an entry of each cluster, (G, C), summed over the query heads of a KV head.

    An entry is expected to have its centroid's weight: per row a softmax over clusters, each counted once per entry. With
    this sum, heads that attend sharply count as much as others.

    Args:
        query: (G, R, D) float32, scaled.
        centroids: (G, C, D).
        sizes: (G, C); 0 marks a column without a cluster, whose score is negative.
        softcap: the layer's own, None where it has none.
    """
    counts = torch.from_numpy(sizes).float()
    logits = apply_softcap(query @ centroids.transpose(1, 2), softcap)  # (G, R, C)
    mass = (logits + counts.log()[:, None]).logsumexp(-1, keepdim=True)
    weights = (logits - mass).exp().sum(1)  # (G, C)
    return weights.masked_fill(counts == 0, -1.0)


def select_clusters(
    scores: Tensor, sizes: NDArray[np.int64], limits: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Return per head the best clusters with at most `limits` (G,) entries in all; one that does not fit is skipped.

    `scores` (G, C) are negative for columns without a cluster; `sizes` is (G, C).
    """
    values = scores.numpy()
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(sizes, order, axis=1)
    valid = np.take_along_axis(values, order, axis=1) >= 0
    selected = np.zeros_like(valid)
    room = limits.copy()
    for _ in range(2):  # the best that fit together, then smaller ones that fill the rest
        fits = valid & ~selected & (ranked <= room[:, None])
        now = fits & (np.cumsum(np.where(fits, ranked, 0), axis=1) <= room[:, None])
        selected |= now
        room -= np.where(now, ranked, 0).sum(1)
    return [order[head, selected[head]] for head in range(len(order))]
