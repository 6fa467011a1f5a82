"""A newcomer and the cluster nearest to it: finding it, and joining it.

The statistics follow incrementally (DynaKV §4.2): nothing of the cluster is read.
"""

from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.ops.kmeans import nearest


def nearest_clusters(retriever: ClusterRetriever, keys: Tensor) -> list[tuple[int, float]]:
    """For one key per head (G, D) float32 the nearest cluster of the head and the squared distance to its centroid."""
    centroids = retriever.parts.representatives.of(retriever.layer)  # (G, C, D)
    columns = Tensor(retriever.table.sizes[:, : centroids.shape[1]] > 0).bool()
    found = nearest(keys[:, None], centroids, columns)  # (G, 1)
    index = found[..., None].expand(-1, -1, keys.shape[1])
    distances = (centroids.gather(1, index)[:, 0] - keys).square().sum(-1)
    return list(zip(found[:, 0].tolist(), distances.tolist(), strict=True))


def join(
    retriever: ClusterRetriever, head: int, cluster: int, key: Tensor, entry: Tensor, squared_distance: float
) -> None:
    """Add an entry (E,) with its key (D,) to a cluster whose centroid is so far away."""
    table, representatives = retriever.table, retriever.parts.representatives
    variance = table.tentative(head, cluster, squared_distance)
    retriever.store.append(retriever.layer, head, cluster, entry)
    centroid = representatives.of(retriever.layer)[head, cluster]
    size = int(table.sizes[head, cluster])
    table.variances[head, cluster] = variance
    representatives.put(retriever.layer, head, cluster, centroid + (key - centroid) / size)
