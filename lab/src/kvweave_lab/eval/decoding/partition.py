"""How well entries are grouped: the variance of clusters as decoding keeps them, and of the best grouping beside it."""

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.ops.kmeans import k_means
from kvweave_lab.eval.decoding.watching import WatchedRetriever


def inner(held: OffloadedCache, layer: int) -> object:
    """The retriever of a layer, whether it is watched or not."""
    retriever = held.layers[layer].retriever
    return retriever.inner if isinstance(retriever, WatchedRetriever) else retriever


def variance(held: OffloadedCache) -> tuple[float, float] | None:
    """Mean squared distance of a key to its cluster's centroid, and clusters per head: means over all heads.

    None where no layer has clusters. Entries that wait for a cluster belong to none.
    """
    spread, count = [], []
    for layer in range(len(held.layers)):
        retriever = inner(held, layer)
        if isinstance(retriever, ClusterRetriever) and not retriever.empty:
            sizes, variances = retriever.table.sizes, retriever.table.variances
            spread += [float(np.average(variances[head], weights=own)) for head, own in enumerate(sizes)]
            count += (sizes > 0).sum(1).tolist()
    return (float(np.mean(spread)), float(np.mean(count))) if spread else None


def members(held: OffloadedCache, layer: int, head: int) -> list[Tensor]:
    """The keys (n, D) float32 of each cluster of a head, read where need be; none for a strategy without clusters."""
    retriever, store = inner(held, layer), held.parts.store
    if not isinstance(retriever, ClusterRetriever):
        return []
    found = []
    for cluster in range(int(retriever.table.count[head])):
        store.ensure([(layer, head, cluster)])
        found.append(store.form.decode(store.entries(layer, head, cluster))[0].float().clone())
        store.residents.release()
    return found


def global_variance(keys: Tensor, clusters: int) -> float:
    """What grouping all keys (G, n, D) anew into so many clusters would come to, on the mean over heads."""
    points = keys.float().cpu()
    assigned = k_means(points, clusters)
    found = []
    for own, number in zip(points, assigned, strict=True):
        sizes = torch.bincount(number, minlength=clusters).clamp(min=1)
        centroids = torch.zeros(clusters, own.shape[1]).index_add_(0, number, own) / sizes[:, None]
        found.append(float((own - centroids[number]).square().sum(-1).mean()))
    return float(np.mean(found))
