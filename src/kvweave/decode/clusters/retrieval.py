"""One layer's clusters while decoding: made from a prompt, chosen by queries, attended to; strategies let them grow.

Brings together the table, centroids, waiting entries and storage. How a newcomer joins a cluster is what a strategy
adds. Tensor letters: G KV heads, n entries, C clusters, D head width, E bytes of an entry.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.buffers import BufferedEntries
from kvweave.decode.clusters.centroids import Centroids
from kvweave.decode.clusters.selection import best_entries, choose, score, sizes_tensor
from kvweave.decode.clusters.table import ClusterTable, keys_of
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_store import StoredClusters
from kvweave.decode.disk.layout import chain, together
from kvweave.decode.retriever import TokenBudget
from kvweave.decode.settings import OffloadSettings
from kvweave.ops.kmeans import halve, k_means
from kvweave.ops.partial_attention import PartialAttention

PORTION_PAGES = 512
"""Pages of a head that are attended to at once, at most."""
Portion = list[NDArray[np.int64]]
"""Some chosen clusters of each head."""
FIRST_CLUSTERS = 4
"""How many clusters a text without a prompt begins with, if the budget lets so many entries wait."""


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """What the layers of one text share; `portion_pages` bounds what is laid out for attention at once, per head."""

    settings: OffloadSettings
    store: StoredClusters
    representatives: Centroids
    counts: DecodeCounts
    portion_pages: int = PORTION_PAGES


class ClusterRetriever(ABC):
    """Entries of one layer in clusters (DynaKV §2.1): a query attends to the best clusters, or to the best of their entries.

    `when_read` is called in every pass as soon as this layer needs nothing more from flash, before it attends.
    `own_candidates`: entries that chosen clusters hold for each that may be attended to, unless settings say otherwise.
    """

    own_candidates = 1.0

    def __init__(self, layer: int, parts: ClusterParts) -> None:
        self.layer = layer
        self.parts = parts
        self.store = parts.store
        self.table: ClusterTable = parts.store.tables[layer]
        heads = self.table.heads
        self.waiting = BufferedEntries(heads, parts.store.form.bytes)
        self.thresholds: np.ndarray[tuple[int], np.dtype[np.float64]] = np.zeros(heads)
        self.chosen: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in range(heads)]
        self.when_read: Callable[[], None] = lambda: None
        self.before_growth: Callable[[int], None] = lambda more_bytes: None
        self.candidates = parts.settings.clusters.candidates or self.own_candidates

    # What strategies differ in

    @abstractmethod
    def newcomers(self, keys: Tensor, entries: Tensor, allowed: TokenBudget) -> None:
        """Take in one entry per head: keys (G, D) float32, entries (G, E)."""

    def after_attention(self, allowed: TokenBudget) -> None:
        """What a strategy puts off until the chosen clusters are in memory; nothing for most."""
        return

    # The retriever's own

    @property
    def resident_bytes(self) -> int:
        """What the waiting entries take."""
        return self.waiting.resident_bytes

    @property
    def empty(self) -> bool:
        """Whether there are no clusters yet."""
        return not self.table.count.any()

    def begin(self) -> None:
        """Start reading the centroids."""
        if not self.empty:
            self.parts.representatives.begin(self.layer)

    def ahead(self) -> None:
        """Start reading the clusters that the last pass chose."""
        self.store.fetch_ahead(keys_of(self.layer, self.chosen))

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """All; before there are clusters, none until they make some, as far as the budget lets them wait."""
        if not self.empty:
            return waiting
        few = FIRST_CLUSTERS * self.parts.settings.clusters.mean_entries
        at_once = min(few, max(1, allowed.left(self.parts.settings.sinks + allowed.window)))
        return waiting if waiting >= at_once else 0

    def add(self, keys: Tensor, values: Tensor, allowed: TokenBudget) -> None:
        """Take in entries (G, n, D), one after the other; the first ones make clusters."""
        if self.empty:
            self.fill(keys, values, None)
            return
        entries = self.store.form.encode(keys, values)  # (G, n, E)
        whole = keys.float().cpu()
        for number in range(keys.shape[1]):
            self.expect(clusters=0, rows=keys.shape[0], waiting=1)
            self.newcomers(whole[:, number], entries[:, number], allowed)

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Group entries (G, n, D) and write them, clusters that the queries (H, T, D) ask for together as neighbours."""
        whole = keys.float().cpu()
        settings = self.parts.settings
        clusters = -(-keys.shape[1] // settings.clusters.mean_entries)
        assigned = k_means(whole, clusters)
        members = [self._members(whole[head], assigned[head]) for head in range(keys.shape[0])]
        order = self._order(whole, members, queries)
        for head, own in enumerate(members):
            first = int(self.table.count[head])
            entries = self.store.form.encode(keys[head], values[head])  # one head's at a time are in memory
            for number in order[head]:
                self.make(head, whole[head, own[number]], entries[own[number]])
            made = slice(first, int(self.table.count[head]))
            sizes, variances = self.table.sizes[head, made], self.table.variances[head, made]
            if first == 0:
                self.thresholds[head] = settings.clusters.spread * np.average(variances, weights=sizes)
        self.parts.representatives.end(self.layer)

    def make(self, head: int, keys: Tensor, entries: Tensor) -> int:
        """A new cluster of keys (n, D) float32 and their entries (n, E), written to flash; returns its number."""
        self.expect(clusters=1, rows=1)
        cluster = self.store.create(self.layer, head, entries)
        self.describe(head, cluster, keys)
        return cluster

    def describe(self, head: int, cluster: int, keys: Tensor) -> None:
        """Note centroid, size and variance of a cluster that holds these keys (n, D) and no others."""
        centroid = keys.mean(0)
        variance = float((keys - centroid).square().sum(-1).mean())
        self.parts.representatives.put(self.layer, head, cluster, centroid)
        self.table.describe(head, cluster, keys.shape[0], variance)

    def attend(self, attention: PartialAttention, left: int) -> int:
        """Attend to waiting entries and to the best clusters, `left` entries per head in all."""
        attended = self._attend_waiting(attention)
        if self.empty:
            return attended
        centroids = self.parts.representatives.of(self.layer)
        sizes = self.table.sizes[:, : centroids.shape[1]]
        scores = score(attention.query.cpu(), centroids, sizes_tensor(sizes), attention.softcap)
        room = np.maximum(left - self.waiting.count, 0)
        self.store.come_to(self.layer)
        few_rows = attention.query.shape[1] <= attention.query.shape[2]
        candidates = self.candidates if few_rows else 1.0  # the logits of more would outweigh the entries
        looked_through = np.minimum(room * candidates, sizes.sum(1)).astype(np.int64)
        found = self._choose(scores, sizes, looked_through)
        batches = self._batches()
        if len(batches) > 1 and (found > room).any():
            # What does not fit at once would be read twice, to be looked through and to be attended to.
            found = self._choose(scores, sizes, room)
            batches = self._batches()
        self._attend_chosen(attention, batches, np.minimum(found, room), looking=bool((found > room).any()))
        return attended + int(np.minimum(found, room).sum())

    def settle(self, allowed: TokenBudget) -> None:
        """Strategies' deferred work; then the centroids may go."""
        self.after_attention(allowed)
        self.parts.representatives.end(self.layer)

    def expect(self, clusters: int, rows: int, waiting: int = 0) -> None:
        """Have room for so many new clusters and changed centroids, and for so many entries of each head that come to wait."""
        more = self.parts.representatives.growth_bytes(self.layer, clusters, rows)
        more += self.waiting.growth_bytes(waiting)
        if more:
            self.before_growth(more)

    # Attention

    def _attend_waiting(self, attention: PartialAttention) -> int:
        entries, there = self.waiting.held()
        if entries.shape[1]:
            keys, values = self.store.form.decode(entries)
            device = attention.query.device
            attention.add(keys.to(device), values.to(device), there.to(device))
        return int(self.waiting.count.sum())

    def _choose(
        self, scores: Tensor, sizes: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Choose clusters of at most so many `entries` (G,); how many they hold."""
        chosen = choose(scores, sizes, entries)
        self.chosen = [self._by_place(head, own) for head, own in enumerate(chosen)]
        return np.array([sizes[head, own].sum() for head, own in enumerate(self.chosen)])

    def _attend_chosen(
        self,
        attention: PartialAttention,
        batches: list[list[Portion]],
        left: NDArray[np.int64],
        *,
        looking: bool,
    ) -> None:
        store, counts = self.store, self.parts.counts
        keys = keys_of(self.layer, self.chosen)
        counts.retrieved += len(keys)
        stayed, ahead = store.ready(keys)
        counts.hits += stayed
        counts.hits_ahead += ahead
        for batch in batches:
            own = np.concatenate([keys_of(self.layer, portion) for portion in batch] or [keys])
            store.bring(own)
            if batch is batches[-1]:
                self.when_read()
            if looking:
                self._attend_best(attention, batch, left)
            else:
                for portion in batch:
                    self._attend_whole(attention, portion)
            store.let_go(own)

    def _attend_whole(self, attention: PartialAttention, portion: Portion) -> None:
        """Attend to all entries of clusters in memory."""
        device = attention.query.device
        numbers, counts = self.store.place(self.layer, portion)
        keys, values = self.store.keys(numbers), self.store.values(numbers)
        attention.add(keys.to(device), values.to(device), _there(numbers, counts)[:, None].to(device))

    def _attend_best(
        self, attention: PartialAttention, batch: list[Portion], left: NDArray[np.int64]
    ) -> None:
        """Attend to the entries that weigh most, `left` (G,) of them, of clusters that are all in memory."""
        device = attention.query.device
        places, found = [], []
        for portion in batch:
            numbers, counts = self.store.place(self.layer, portion)
            logits = attention.logits(self.store.keys(numbers).to(device))  # (G, R, n)
            hidden = ~_there(numbers, counts)[:, None]
            places.append(numbers)
            found.append(logits.masked_fill_(hidden.to(device), float("-inf")))
        logits, numbers = torch.cat(found, dim=-1), torch.cat(places, dim=-1)
        best, there = best_entries(logits, attention.log_mass, left)
        logits = logits.gather(2, best[:, None].expand(-1, logits.shape[1], -1))
        logits.masked_fill_(~there[:, None], float("-inf"))
        numbers = numbers.gather(1, best.to(numbers.device))
        portion_entries = self.parts.portion_pages * self.store.form.per_page
        for some, own in zip(
            numbers.split(portion_entries, 1), logits.split(portion_entries, 2), strict=True
        ):
            attention.add_weighed(own, self.store.values(some).to(device))

    def _batches(self) -> list[list[Portion]]:
        """The chosen clusters in portions that are laid out together, and those in batches that fit into memory."""
        heads = self.table.heads
        capacity = self.store.room()
        fitting = (
            capacity // heads - self.store.pages.largest_pages + 1
        )  # a portion ends with a whole cluster
        portion_pages = max(1, min(self.parts.portion_pages, capacity // (2 * heads), fitting))
        portions: dict[int, Portion] = defaultdict(lambda: [np.zeros(0, np.int64)] * heads)
        taken: dict[int, int] = defaultdict(int)  # pages of each portion
        for head, clusters in enumerate(self.chosen):
            if not clusters.size:
                continue
            ends = np.cumsum(self.store.form.pages(self.table.sizes[head, clusters]))
            numbers = (ends - 1) // portion_pages
            first = np.flatnonzero(np.diff(numbers, prepend=-1))  # of each portion
            for own, number, pages in zip(
                np.split(clusters, first)[1:],
                numbers[first].tolist(),
                np.diff(ends[np.append(first[1:], len(ends)) - 1], prepend=0).tolist(),
                strict=True,
            ):
                portions[number][head] = own
                taken[number] += pages
        batches: list[list[Portion]] = [[]]  # one at least, even of nothing
        room = capacity
        for number in sorted(portions):
            if batches[-1] and taken[number] > room:
                batches.append([])
                room = capacity
            batches[-1].append(portions[number])
            room -= taken[number]
        return batches

    def _by_place(self, head: int, clusters: NDArray[np.int64]) -> NDArray[np.int64]:
        """In the order in which they lie on flash: half pools are numbered so."""
        return clusters[np.argsort(self.table.homes[head, clusters], kind="stable")]

    # Making clusters of a prompt

    def _members(self, keys: Tensor, assigned: Tensor) -> list[Tensor]:
        """The entries of each cluster, none empty and none above the largest size, as indices."""
        order = assigned.argsort(stable=True)
        found = [own for own in order.split(torch.bincount(assigned).tolist()) if own.numel()]
        largest = self.parts.settings.clusters.max_entries
        whole: list[Tensor] = []
        while found:
            own = found.pop()
            if own.numel() <= largest:
                whole.append(own)
                continue
            side = halve(keys[own], own.numel() - 1)
            found += [own[~side], own[side]]
        return whole[::-1]

    def _order(self, keys: Tensor, members: list[list[Tensor]], queries: Tensor | None) -> list[list[int]]:
        """Per head the order in which clusters are written."""
        settings = self.parts.settings
        if settings.flash.order == "made" or queries is None or queries.shape[1] == 0:
            return [list(range(len(own))) for own in members]
        heads = keys.shape[0]
        grouped = queries.float().cpu().unflatten(0, (heads, -1))  # (G, H/G, T, D)
        orders = []
        for head, own in enumerate(members):
            centroids = torch.stack([keys[head, part].mean(0) for part in own])  # (K, D)
            sizes = torch.tensor([part.numel() for part in own])
            orders.append(chain(together(self._asked(grouped[head], centroids, sizes, keys.shape[1]))))
        return orders

    def _asked(self, queries: Tensor, centroids: Tensor, sizes: Tensor, stored: int) -> Tensor:
        """Which clusters each row's queries (H/G, T, D) would retrieve, (T, K) bool."""
        budget = self.parts.settings.kv_budget
        wanted = self.candidates * (budget * stored if budget <= 1 else budget)
        left = np.array([min(wanted, stored)], np.int64)
        asked = torch.zeros(queries.shape[1], len(centroids), dtype=torch.bool)
        scaled = queries / queries.shape[-1] ** 0.5
        for row in range(queries.shape[1]):
            scores = score(scaled[None, :, row], centroids[None], sizes[None].float(), None)
            asked[row, choose(scores, sizes[None].numpy(), left)[0]] = True
        return asked


def _there(numbers: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Which of what `place` gave, (G, n), are a head's own."""
    return torch.arange(numbers.shape[1]) < torch.from_numpy(counts)[:, None]
