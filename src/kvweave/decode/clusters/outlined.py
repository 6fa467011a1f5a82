"""Retrieval by outlines: whole clusters are read from the disk, and those that are not read count by their entries' outlines.

Tensor letters: G KV heads, n entries, H query heads, R query rows of a head's group, C clusters, D head width.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.outlines import Outlines
from kvweave.decode.clusters.retrieval import ClusterRetriever, WholeText, with_prefix, write_order
from kvweave.decode.strategy import CacheHooks, Retriever, SharedState, TokenBudget, token_budget
from kvweave.ops.partial_attention import PartialAttention

_TOGETHER: Final = 64
"""Entries whose clusters are looked for at once."""


class OutlinedClusters(ClusterRetriever):
    """Small clusters, chosen by the weight that their entries' outlines have in the attention; no entry counts for nothing.

    A new entry joins the nearest cluster; a full one has a successor. Clusters are never split, so that none is read for that: the
    entries of a cluster that has become wide differ in their codes.
    """

    first_clusters = 8

    def __init__(self, layer: int, shared: SharedState, hooks: CacheHooks) -> None:
        super().__init__(layer, shared, hooks)
        self.outlines = Outlines(self.table.heads, shared.store.entry_format.width)

    @property
    def resident_bytes(self) -> int:
        return self.outlines.resident_bytes

    @property
    def growth_bytes(self) -> int:
        return self.outlines.next_growth_bytes(max(1, self.shared.settings.window // 4))

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Cluster entries (G, n, D) and write them; clusters that the queries (H, T, D) retrieve together are neighbours."""
        settings, outlines, entry_format = self.shared.settings, self.outlines, self.store.entry_format
        sizes = self.shared.clusters
        exact, others = keys.float().cpu(), values.float().cpu()
        asked = None if queries is None else queries.float().cpu()
        first = self.empty
        if first:
            outlines.learn_space(exact, others, asked)
            self.centre = None if entry_format.storage == "exact" else outlines.origin
        stored, heads, count = self.without_centre(keys), *exact.shape[:2]
        clusters = outlines.groups(exact, others, sizes.mean_entries, sizes.max_entries)
        order = write_order(exact, clusters, asked, min(token_budget(settings, count).total, count))
        self._make_room(max(map(len, clusters)), count)
        owners = torch.zeros(heads, count, dtype=torch.int32)
        for head, own in enumerate(clusters):
            entries = entry_format.encode(stored[head], values[head])  # one head at a time in memory
            for number in order[head]:
                some = own[number]
                cluster = self.store.create(self.layer, head, entries[some])
                outlines.put_cluster(head, cluster, exact[head, some].mean(0), others[head, some].mean(0))
                owners[head, some] = cluster
        if first:
            outlines.learn_codes(exact, owners)
        outlines.add_entries(exact, owners)

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Insert entries (G, n, D) into the clusters that are nearest now; the first ones form clusters."""
        if self.empty:
            self.fill(keys, values, None)
            return
        entries = self.store.entry_format.encode(self.without_centre(keys), values)  # (G, n, E)
        exact, others = keys.float().cpu(), values.float().cpu()
        self._make_room(0, keys.shape[1])
        open_ = torch.from_numpy((self.table.sizes > 0) & ~self.table.full)
        blocks = zip(exact.split(_TOGETHER, 1), others.split(_TOGETHER, 1), strict=True)
        owners = torch.cat([self.outlines.nearest(*block, open_) for block in blocks], 1)  # (G, n)
        for head, own in enumerate(owners.tolist()):
            successors = dict[int, int]()
            for number, nearest in enumerate(own):
                while nearest in successors:
                    nearest = successors[nearest]
                cluster = self._insert(head, nearest, others[head, number], entries[head, number])
                if cluster != nearest:
                    successors[nearest] = cluster
                owners[head, number] = cluster
        self.outlines.add_entries(exact, owners)

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Attend to the best clusters, `limit` entries per head, and to the others by their outlines."""
        if self.empty:
            return 0
        device, columns = attention.query.device, self.outlines.clusters
        sizes = self.table.sizes[:, :columns]
        counts = torch.from_numpy(sizes).float()
        masses = self.outlines.log_masses(attention.query.cpu(), counts, attention.softcap)  # (G, R, C)
        total = torch.logaddexp(masses.logsumexp(-1), attention.log_mass.cpu())
        scores = (masses - total[..., None]).exp().sum(1) / counts  # the weight of an entry
        scores = scores.masked_fill(counts == 0, -1.0)
        self.store.start_layer(self.layer)
        found = self.select(scores, sizes, np.minimum(limit, sizes.sum(1)))
        self.attend_selected(attention, self.batches(), self.attend_whole)
        for head, own in enumerate(self.selected):
            masses[head, :, torch.from_numpy(own)] = float("-inf")
        attention.add_estimate(masses.to(device), self.outlines.mean_values().to(device))
        return int(found.sum())

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"outlines.{name}": own for name, own in self.outlines.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.outlines.restore(with_prefix(state, "outlines."))

    def _insert(self, head: int, cluster: int, value: Tensor, entry: Tensor) -> int:
        """Append an entry (E,) to a cluster, or to a successor if that is full; return the one it is in.

        A full cluster takes no others. Its successor has its mean key, or each new entry would be nearer to the full one again.
        """
        size = int(self.table.sizes[head, cluster])
        if size >= self.shared.clusters.max_entries:
            self.table.full[head, cluster] = True
            self._make_room(1, 0)
            key = self.outlines.mean_key(head, cluster)
            cluster = self.store.create(self.layer, head, entry[None])
            self.outlines.put_cluster(head, cluster, key, value)
            return cluster
        self.store.append(self.layer, head, cluster, entry)
        self.outlines.add_value(head, cluster, value, size + 1)
        return cluster

    def _make_room(self, clusters: int, entries: int) -> None:
        """Make room for the outlines of what is about to be added, within the memory limit."""
        more_bytes = self.outlines.growth_bytes(clusters, entries)
        if more_bytes:
            self.hooks.reserve_memory(more_bytes)
            self.outlines.make_room(clusters, entries)


def outlined_or_whole(layer: int, shared: SharedState, hooks: CacheHooks) -> Retriever:
    """Return the retriever of kvweave's strategy: with outlines, unless every step attends to everything."""
    kind = WholeText if shared.settings.kv_budget == 1 else OutlinedClusters
    return kind(layer, shared, hooks)
