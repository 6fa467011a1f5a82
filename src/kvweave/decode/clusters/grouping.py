"""Clusters of a prompt: which entries form them, and in which order they are written to disk.

Tensor letters: G KV heads, H query heads, n entries, K clusters, D head width. Knows nothing of files.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.selection import score_clusters, select_clusters
from kvweave.decode.disk.layout import co_retrievals, neighbour_order
from kvweave.ops.kmeans import split_in_two


def split_into_clusters(keys: Tensor, assigned: Tensor, max_entries: int) -> list[Tensor]:
    """Return the indices of each cluster's keys, given keys (n, D) and their assignment (n,) by k-means.

    Empty clusters are left out, and those above `max_entries` are split.
    """
    order = assigned.argsort(stable=True)
    pending = [own for own in order.split(torch.bincount(assigned).tolist()) if own.numel()]
    clusters: list[Tensor] = []
    while pending:
        own = pending.pop()
        if own.numel() <= max_entries:
            clusters.append(own)
            continue
        side = split_in_two(keys[own], own.numel() - 1)
        pending += [own[~side], own[side]]
    return clusters[::-1]


def write_order(
    keys: Tensor, clusters: Sequence[Sequence[Tensor]], queries: Tensor, limit: int
) -> list[list[int]]:
    """Return for each head the order in which its clusters are written: those retrieved together become neighbours.

    Args:
        keys: (G, n, D) float32.
        clusters: indices of each cluster's keys, per head.
        queries: (H, T, D); each row is counted as one retrieval.
        limit: entries that a row retrieves per head.
    """
    grouped = queries.float().cpu().unflatten(0, (keys.shape[0], -1))  # (G, H/G, T, D)
    orders = []
    for head, own in enumerate(clusters):
        centroids = torch.stack([keys[head, part].mean(0) for part in own])  # (K, D)
        sizes = np.array([part.numel() for part in own])
        retrieved = _retrievals(grouped[head], centroids, sizes, limit)
        orders.append(neighbour_order(co_retrievals(retrieved)))
    return orders


def _retrievals(
    queries: Tensor, centroids: Tensor, sizes: np.ndarray[tuple[int], np.dtype[np.int64]], limit: int
) -> Tensor:
    """Return which clusters each row of queries (H/G, T, D) would retrieve, (T, K) bool."""
    retrieved = torch.zeros(queries.shape[1], len(centroids), dtype=torch.bool)
    scaled = queries / queries.shape[-1] ** 0.5
    for row in range(queries.shape[1]):
        scores = score_clusters(scaled[None, :, row], centroids[None], sizes[None], None)
        retrieved[row, select_clusters(scores, sizes[None], np.array([limit]))[0]] = True
    return retrieved
