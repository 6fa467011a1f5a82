"""Strategies that choose by an index in memory which entries a step reads, and may estimate the attention to the others.

They stand for other systems' methods and for `outline` where strategies are compared at equal bytes read. Entries stay in
memory: only quality is measured. New entries join the index at once.
Tensor letters: G KV heads, R query rows of a head's group, n entries, C clusters, D head width.
"""

from abc import ABC, abstractmethod
from copy import copy
from functools import partial

import torch
from torch import Tensor

from kvweave.decode.strategy import CacheHooks, Retriever, SharedState, Strategy, TokenBudget
from kvweave.ops.kmeans import k_means, nearest
from kvweave.ops.partial_attention import PartialAttention

FIRST_ENTRIES = 128
"""With fewer entries there is no index: they stay in the window."""
NUMBER_BYTES = 2
"""Of a number in an index: sizes are those beside KV in 16 bits."""

Estimate = tuple[Tensor, Tensor]
"""Logits (G, R, m), −inf for what is left out, and values (G, m, D), of what stands for unread entries."""


class IndexedRetriever(Retriever, ABC):
    """Entries of one layer in memory: keys and values (G, n, D) float32, and an index of theirs.

    Attributes:
        index_bytes: size of the index as the method stores it.
    """

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        heads, width = shared.store.tables[layer].heads, shared.store.entry_format.width
        self.keys = self.values = torch.empty(heads, 0, width)
        self.index_bytes = 0.0

    # Defined by strategies

    @abstractmethod
    def build(self, queries: Tensor | None) -> None:
        """Index the entries that a prompt has; `queries` (G, R, D) are those of its last rows, scaled, if known."""

    @abstractmethod
    def extend(self, first: int) -> None:
        """Index the entries from `first` on."""

    @abstractmethod
    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Return the entries to read as indices (G, limit).

        `query` is (G, R, D), scaled; `log_mass` (G, R) is of what is attended to in any case.
        """

    def estimate(self, query: Tensor, chosen: Tensor) -> Estimate | None:
        """Return what stands for the entries that are not `chosen` (G, limit); None if they count for nothing."""
        return None

    # The Retriever interface

    @property
    def resident_bytes(self) -> int:
        """Bytes of the index."""
        return round(self.index_bytes)

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Accept all once there are enough for an index."""
        return count if self.keys.shape[1] or count >= FIRST_ENTRIES else 0

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Store entries (G, n, D) and index them; `queries` (H, T, D) are those of the prompt's last rows."""
        first = self._append(keys, values)
        if first:
            self.extend(first)
            return
        if queries is not None:
            heads, width = self.keys.shape[0], self.keys.shape[2]
            queries = queries.float().reshape(heads, -1, width) * width**-0.5
        self.build(queries)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Store entries (G, n, D) and index them."""
        self.fill(keys, values, None)

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Attend to the `limit` chosen entries of each head, and to estimates of the others."""
        count = min(limit, self.keys.shape[1])
        if not count:
            return 0
        chosen = self.choose(attention.query, attention.log_mass, count)
        index = chosen[..., None].expand(-1, -1, self.keys.shape[2])
        estimate = self.estimate(attention.query, chosen)
        attention.add(self.keys.gather(1, index), self.values.gather(1, index))
        if estimate is not None:
            attention.add_estimate(*estimate)
        return chosen.numel()

    def _append(self, keys: Tensor, values: Tensor) -> int:
        first = self.keys.shape[1]
        self.keys = torch.cat([self.keys, keys.float()], dim=1)
        self.values = torch.cat([self.values, values.float()], dim=1)
        return first


def weights(logits: Tensor, log_mass: Tensor) -> Tensor:
    """Return the shares (G, n) of entries with logits (G, R, n) in the softmax over them and `log_mass`, summed over rows."""
    total = torch.logaddexp(logits.logsumexp(-1), log_mass)
    return (logits - total[..., None]).exp().sum(1)


class Oracle(IndexedRetriever):
    """The entries with the largest exact weights: the most that a choice without estimates can reach."""

    def build(self, queries: Tensor | None) -> None:
        """Index nothing."""

    def extend(self, first: int) -> None:
        """Index nothing."""

    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Rank all keys."""
        return weights(query @ self.keys.transpose(1, 2), log_mass).topk(limit).indices


class ProductCodes(IndexedRetriever):
    """Single entries, ranked by product-quantised keys (PQCache, arXiv 2407.12820)."""

    def __init__(
        self, layer: int, shared: SharedState, hooks: CacheHooks, *, parts: int = 2, bits: int = 6
    ) -> None:
        super().__init__(layer, shared, hooks)
        self._parts, self._bits = parts, bits

    def build(self, queries: Tensor | None) -> None:
        """Make the codebooks of all parts, and code the keys."""
        self._books = [
            book_of(part.contiguous(), 2**self._bits)[0] for part in self.keys.chunk(self._parts, -1)
        ]
        self._coded = self.keys[:, :0]
        self.extend(0)

    def extend(self, first: int) -> None:
        """Code keys."""
        parts = self.keys[:, first:].chunk(self._parts, -1)
        coded = [rows_of(book, nearest(part, book)) for part, book in zip(parts, self._books, strict=True)]
        self._coded = torch.cat([self._coded, torch.cat(coded, -1)], dim=1)
        codes = self.keys.shape[0] * self.keys.shape[1] * self._parts * self._bits / 8
        self.index_bytes = codes + NUMBER_BYTES * sum(book.numel() for book in self._books)

    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Rank all entries by their codes."""
        return weights(query @ self._coded.transpose(1, 2), log_mass).topk(limit).indices


class QuestPages(IndexedRetriever):
    """Pages of consecutive entries, ranked by an upper bound from the least and largest of each channel (Quest, 2406.10774)."""

    page_entries = 16

    def build(self, queries: Tensor | None) -> None:
        """Bound all pages."""
        self.extend(0)

    def extend(self, first: int) -> None:
        """Bound all pages anew."""
        short = -self.keys.shape[1] % self.page_entries
        padded = torch.cat([self.keys, self.keys[:, -1:].expand(-1, short, -1)], dim=1)
        pages = padded.unflatten(1, (-1, self.page_entries))  # (G, P, page, D)
        self._low, self._high = pages.amin(2), pages.amax(2)
        self.index_bytes = NUMBER_BYTES * 2 * self._low.numel()

    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Rank pages; the last one is read in part."""
        most = query.clamp(min=0) @ self._high.transpose(1, 2) + query.clamp(max=0) @ self._low.transpose(
            1, 2
        )
        count = self.keys.shape[1]
        own = torch.arange(count).expand(self.keys.shape[0], -1) // self.page_entries
        return _best_groups(weights(most, log_mass), own, limit)


class CosineClusters(IndexedRetriever):
    """Clusters of keys by their direction; the last one chosen is read in part (ClusterKV, arXiv 2412.03213).

    With `estimates`, the other clusters count by centroid, mean value and size (RetroInfer, arXiv 2505.02922; there an
    estimation zone of some of them).
    """

    def __init__(
        self,
        layer: int,
        shared: SharedState,
        hooks: CacheHooks,
        *,
        mean_entries: int = 80,
        estimates: bool = False,
    ) -> None:
        super().__init__(layer, shared, hooks)
        self._mean_entries, self._estimates = mean_entries, estimates

    def build(self, queries: Tensor | None) -> None:
        """Cluster all keys."""
        directions = torch.nn.functional.normalize(self.keys, dim=-1)
        self._directions, self._own = book_of(directions, -(-self.keys.shape[1] // self._mean_entries))
        self._sums = ClusterSums(self._rows(0), self._own)
        self.index_bytes = NUMBER_BYTES * self._directions.numel() * (2 if self._estimates else 1)

    def extend(self, first: int) -> None:
        """Let keys join the nearest clusters."""
        directions = torch.nn.functional.normalize(self.keys[:, first:], dim=-1)
        own = nearest(directions, self._directions)
        self._own = torch.cat([self._own, own], dim=1)
        self._sums.add(self._rows(first), own)

    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Rank clusters by the weight of an entry at their centroid."""
        logits = query @ self._sums.means().chunk(2, -1)[0].transpose(1, 2)
        total = torch.logaddexp((logits + self._sums.sizes.log()[:, None]).logsumexp(-1), log_mass)
        return _best_groups((logits - total[..., None]).exp().sum(1), self._own, limit)

    def estimate(self, query: Tensor, chosen: Tensor) -> Estimate | None:
        """Return the mean keys' logits and the mean values of what is left of every cluster, if they count."""
        if not self._estimates:
            return None
        read = torch.cat([rows_of(self.keys, chosen), rows_of(self.values, chosen)], dim=-1)
        left = self._sums.without(read, self._own.gather(1, chosen))
        keys, values = left.means().chunk(2, -1)
        return query @ keys.transpose(1, 2) + left.sizes.log()[:, None], values

    def _rows(self, first: int) -> Tensor:
        return torch.cat([self.keys[:, first:], self.values[:, first:]], dim=-1)


class OutlineEntries(IndexedRetriever):
    """Single entries, ranked by an outline of each; those that are not read are attended to by their outlines.

    An entry's outline is its cluster, with mean key and value, and a code of 2 bits for each of the directions in which
    keys differ most from their cluster's. Clusters and directions are made in a space where keys are as far apart as the
    prompt's last queries find them, so that nothing is spent on what no query asks. A cluster's mean value is that of its
    unread entries, since what has been read is known.

    Ours. Single parts are known: ranking by codes (PQCache) and estimates by cluster (RetroInfer).
    """

    def __init__(
        self,
        layer: int,
        shared: SharedState,
        hooks: CacheHooks,
        *,
        mean_entries: int = 64,
        directions: int = 32,
    ) -> None:
        super().__init__(layer, shared, hooks)
        self._mean_entries, self._directions = mean_entries, directions

    def build(self, queries: Tensor | None) -> None:
        """Make the space, the clusters in it, the directions and the codes."""
        width = self.keys.shape[2]
        asked = self.keys if queries is None else queries  # (G, r, D)
        energy, axes = torch.linalg.eigh(asked.transpose(1, 2) @ asked / asked.shape[1])
        energy = energy.clamp(min=0) + 0.02 * energy.mean(
            -1, keepdim=True
        )  # queries to come may ask other things
        seen = axes * energy.sqrt()[:, None]  # (G, D, D): |k @ seen|² is the mean square of a query's logits
        spreads = [_centred(rows).square().sum(-1).mean(1) for rows in (self.keys @ seen, self.values)]
        scale = (spreads[0] / spreads[1].clamp(min=1e-12)).sqrt()[:, None, None]
        self._value_axes = torch.eye(width) * scale  # keys and values count alike
        self._key_axes = seen
        clusters = -(-self.keys.shape[1] // self._mean_entries)
        self._book, self._own = book_of(self._points(0), clusters)
        self._centroids = ClusterSums(self.keys, self._own).means()
        self._values = ClusterSums(self.values, self._own)
        rest = (self.keys - rows_of(self._centroids, self._own)) @ seen
        _, main = torch.linalg.eigh(rest.transpose(1, 2) @ rest)
        main = main[..., -min(self._directions, width) :]  # (G, D, d)
        self._into = seen @ main
        self._out = main.transpose(1, 2) @ (axes / energy.sqrt()[:, None]).transpose(1, 2)  # (G, d, D)
        self._step = (rest @ main).std(1, keepdim=True)
        self._outlines = self.keys[:, :0]
        self._add_outlines(0)

    def extend(self, first: int) -> None:
        """Let entries join the nearest clusters, and code them."""
        own = nearest(self._points(first), self._book)
        self._own = torch.cat([self._own, own], dim=1)
        self._values.add(self.values[:, first:], own)
        self._add_outlines(first)

    def choose(self, query: Tensor, log_mass: Tensor, limit: int) -> Tensor:
        """Rank all entries by their outlines."""
        self._logits = query @ self._outlines.transpose(1, 2)
        return weights(self._logits, log_mass).topk(limit).indices

    def estimate(self, query: Tensor, chosen: Tensor) -> Estimate | None:
        """Return for each cluster the sum of the unread entries' weights by their outlines, and their mean value."""
        hidden = chosen[:, None].expand(-1, query.shape[1], -1)
        logits = self._logits.scatter(2, hidden, float("-inf"))
        highest = logits.amax(-1, keepdim=True).clamp(min=-1e30)
        shares = (logits - highest).exp()
        left = self._values.without(rows_of(self.values, chosen), self._own.gather(1, chosen))
        mass = torch.zeros(*shares.shape[:2], left.sizes.shape[1])
        mass.scatter_add_(2, self._own[:, None].expand_as(shares), shares)
        return mass.log() + highest, left.means()

    def _points(self, first: int) -> Tensor:
        return torch.cat(
            [self.keys[:, first:] @ self._key_axes, self.values[:, first:] @ self._value_axes], dim=-1
        )

    def _add_outlines(self, first: int) -> None:
        centroids = rows_of(self._centroids, self._own[:, first:])
        steps = ((self.keys[:, first:] - centroids) @ self._into / self._step.clamp(min=1e-12)).floor()
        coded = (steps.clamp(-2, 1) + 0.5) * self._step  # 2 bits
        self._outlines = torch.cat([self._outlines, centroids + coded @ self._out], dim=1)
        codes = self.keys.shape[0] * self.keys.shape[1] * self._out.shape[1] * 2 / 8
        self.index_bytes = codes + NUMBER_BYTES * (2 * self._centroids.numel() + self._out.numel())


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(1, keepdim=True)


class ClusterSums:
    """How many rows each cluster has, `sizes` (G, C), and their sums (G, C, D)."""

    def __init__(self, rows: Tensor, own: Tensor) -> None:
        self.sizes = torch.zeros(rows.shape[0], int(own.max()) + 1)
        self._sums = torch.zeros(*self.sizes.shape, rows.shape[2])
        self.add(rows, own)

    def add(self, rows: Tensor, own: Tensor) -> None:
        """Count rows (G, n, D) of clusters `own` (G, n)."""
        self.sizes.scatter_add_(1, own, torch.ones(own.shape))
        self._sums.scatter_add_(1, own[..., None].expand_as(rows), rows)

    def without(self, rows: Tensor, own: Tensor) -> "ClusterSums":
        """Return the sums of what is left without these rows."""
        left = copy(self)
        left.sizes = self.sizes.scatter_add(1, own, -torch.ones(own.shape))
        left._sums = self._sums.scatter_add(1, own[..., None].expand_as(rows), -rows)
        return left

    def means(self) -> Tensor:
        """Return the mean row of each cluster, (G, C, D)."""
        return self._sums / self.sizes[..., None].clamp(min=1)


def book_of(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return k-means centroids (G, K, D) of points (G, n, D), at most `count`, and each point's own (G, n)."""
    own = k_means(points, count)
    return ClusterSums(points, own).means(), own


def rows_of(book: Tensor, own: Tensor) -> Tensor:
    """Return rows (G, n, D) of a book (G, K, D)."""
    return book.gather(1, own[..., None].expand(-1, -1, book.shape[2]))


def _best_groups(scores: Tensor, own: Tensor, limit: int) -> Tensor:
    """Return `limit` entries (G, limit): those of the best groups; `own` (G, n) is each entry's, `scores` are (G, C)."""
    rank = scores.argsort(-1, descending=True).argsort(-1)
    return rank.gather(1, own).argsort(dim=-1, stable=True)[:, :limit]


ORACLE = Strategy(Oracle)
PQCACHE = Strategy(ProductCodes)
PQCACHE_FINE = Strategy(partial(ProductCodes, parts=16, bits=8))
QUEST = Strategy(QuestPages)
CLUSTERKV = Strategy(CosineClusters)
RETROINFER = Strategy(partial(CosineClusters, mean_entries=16, estimates=True))
OUTLINE_ENTRIES = Strategy(OutlineEntries)
