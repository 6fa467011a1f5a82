"""How the keys of a text drift away from the clusters of its prompt (DynaKV §2.3, figure 4).

One text is decoded under each way of updating clusters, and compared with clustering all keys again by k-means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.models.adapter import Adapter
from kvweave.ops.kmeans import k_means
from kvweave_lab.eval.decoding.recorder import RecordingRetriever, cluster_variance, unwrapped_retriever
from kvweave_lab.eval.decoding.run import Prefilled, decode
from kvweave_lab.eval.long_texts import LongText

UPDATES = ("static", "local", "dynakv")
GLOBAL = "all keys grouped anew"
"""The name of k-means over all keys, in results and figures."""
_MOST_POINTS = 2000

Point = tuple[float, float, int]
"""First two principal components, and the cluster's number."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Clusters per head and their variance under one update at one length; means over all heads.

    `anew` is the variance of as many k-means clusters of all keys.
    """

    update: str
    decode_tokens: int
    clusters: float
    variance: float
    anew: float


@dataclass(frozen=True, slots=True)
class Shift:
    """`groupings` over all heads by length; `points` of one head at the end, by update and under GLOBAL."""

    text: str
    layer: int
    head: int
    groupings: tuple[Grouping, ...]
    points: Mapping[str, tuple[Point, ...]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return the shift with these JSON values."""
        groupings = tuple(Grouping(**part) for part in content["groupings"])
        points = {
            name: tuple((x, y, int(number)) for x, y, number in own)
            for name, own in content["points"].items()
        }
        return cls(**{**content, "groupings": groupings, "points": points})


def measure_shift(
    adapter: Adapter, text: LongText, base: OffloadSettings, lengths: Sequence[int]
) -> Shift | None:
    """Decode a text under every update; return None if every layer has a sliding window."""
    prefilled = Prefilled.of(adapter, text)
    layers = prefilled.retrieving_layers
    if not layers:
        return None
    layer, head = layers[len(layers) // 2], 0
    groupings: list[Grouping] = []
    clusters: dict[str, list[Tensor]] = {}
    for update in UPDATES:

        def record(length: int, offloaded: OffloadedCache, update: str = update) -> None:
            found = cluster_variance(offloaded)
            if found is not None:
                variance, count = found
                groupings.append(
                    Grouping(update, length, count, variance, _mean_kmeans_variance(offloaded, count))
                )
            if length == lengths[-1]:
                clusters[update] = _cluster_keys(offloaded, layer, head)

        decode(adapter, prefilled, update, replace(base, strategy=update), lengths, record)
    return Shift(text.name, layer, head, tuple(groupings), _points(clusters))


def _cluster_keys(offloaded: OffloadedCache, layer: int, head: int) -> list[Tensor]:
    """Return the keys (n, D) float32 of each cluster of a head, read from disk if necessary; none without clusters."""
    retriever, store = unwrapped_retriever(offloaded, layer), offloaded.shared.store
    if not isinstance(retriever, ClusterRetriever):
        return []
    found = []
    for cluster in range(int(retriever.table.count[head])):
        store.load([(layer, head, cluster)])
        keys = store.entry_format.decode(store.entries(layer, head, cluster))[0].float()
        found.append(retriever.with_centre(keys.clone(), head))
        store.page_cache.unpin_all()
    return found


def _mean_kmeans_variance(offloaded: OffloadedCache, clusters: float) -> float:
    found = []
    for layer in offloaded.layers:
        entries = (
            layer.retriever.buffer.entries() if isinstance(layer.retriever, RecordingRetriever) else None
        )
        if entries is not None:
            found.append(kmeans_variance(entries[0], round(clusters)))
    return sum(found) / len(found)


def kmeans_variance(keys: Tensor, clusters: int) -> float:
    """Return the variance of keys (G, n, D) clustered by k-means, averaged over heads."""
    points = keys.float().cpu()
    assigned = k_means(points, clusters)
    found = []
    for own, number in zip(points, assigned, strict=True):
        sizes = torch.bincount(number, minlength=clusters).clamp(min=1)
        centroids = torch.zeros(clusters, own.shape[1]).index_add_(0, number, own) / sizes[:, None]
        found.append(float((own - centroids[number]).square().sum(-1).mean()))
    return float(np.mean(found))


def _points(clusters: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[Point, ...]]:
    """Project the keys of each update's clusters on the first two principal components of all keys."""
    largest = max(clusters.values(), key=lambda own: sum(part.shape[0] for part in own))
    keys = torch.cat(list(largest))
    mean = keys.mean(0)
    axes = torch.linalg.svd(keys - mean, full_matrices=False).Vh[:2]  # (2, D)
    assigned = k_means(keys[None], len(largest))[0]
    all_clusters = dict(clusters) | {GLOBAL: [keys[assigned == number] for number in range(len(largest))]}
    return {
        name: _thinned(
            [
                (round(x, 2), round(y, 2), number)  # the resolution of a figure
                for number, part in enumerate(own)
                for x, y in ((part - mean) @ axes.T).tolist()
            ]
        )
        for name, own in all_clusters.items()
    }


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    step = -(-len(points) // _MOST_POINTS)
    return tuple(points[::step])
