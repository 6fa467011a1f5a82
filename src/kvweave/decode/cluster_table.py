"""What is known of each cluster of a layer, small enough to stay in memory: size, checksum, place on disk.

Rows are KV heads, columns clusters in the order of their creation.
Tensor letters: G KV heads, C capacity for clusters. Knows nothing of keys, files or budgets.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ClusterKey = tuple[int, int, int]
"""A cluster: layer, head, number."""
ClusterKeys = Sequence[ClusterKey] | NDArray[np.int64]
"""Several clusters; as an array (n, 3)."""

_MIN_GROWTH = 64
_COLUMNS = ("sizes", "full", "checksums", "homes")


class ClusterTable:
    """Arrays (G, C), valid in a head's first `count` columns.

    Attributes:
        count: clusters of each head, (G,).
        sizes: entries on the disk.
        full: whether the cluster takes no more entries.
        checksums: sum of the entries' words modulo 2⁶⁴, signed.
        homes: number of the cluster's first home on disk, see `disk.layout`.
        extra_homes: further homes of clusters that outgrew the first, by head and cluster.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.count: NDArray[np.int64] = np.zeros(heads, np.int64)
        self.sizes: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.full: NDArray[np.bool_] = np.zeros((heads, 0), np.bool_)
        self.checksums: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.homes: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.extra_homes: dict[tuple[int, int], list[int]] = {}

    def new_cluster(self, head: int, home: int) -> int:
        if self.count[head] == self.sizes.shape[1]:
            self._widen()
        number = int(self.count[head])
        self.count[head] += 1
        self.homes[head, number] = home
        return number

    def homes_of(self, head: int, cluster: int) -> list[int]:
        return [int(self.homes[head, cluster]), *self.extra_homes.get((head, cluster), ())]

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return copies of the arrays, for `restore`; extra homes as rows (head, cluster, home)."""
        extra = [
            (head, cluster, home) for (head, cluster), homes in self.extra_homes.items() for home in homes
        ]
        return {name: getattr(self, name).copy() for name in ("count", *_COLUMNS)} | {
            "more": np.array(extra, np.int64).reshape(-1, 3)
        }

    def restore(self, state: dict[str, NDArray[np.generic]]) -> None:
        for name, array in state.items():
            if name != "more":
                setattr(self, name, array)
        for head, cluster, home in state["more"].tolist():
            self.extra_homes.setdefault((head, cluster), []).append(home)

    def _widen(self) -> None:
        more = max(_MIN_GROWTH, self.sizes.shape[1])
        for name in _COLUMNS:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((self.heads, more), array.dtype)], axis=1))


def key_array(keys: ClusterKeys) -> NDArray[np.int64]:
    """Return clusters as an array (n, 3)."""
    return np.asarray(keys, np.int64).reshape(-1, 3)


def key_list(keys: NDArray[np.int64]) -> list[ClusterKey]:
    """Return an array (n, 3) of clusters as a list of keys."""
    return [(layer, head, cluster) for layer, head, cluster in keys.tolist()]


def layer_keys(layer: int, clusters: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the keys (n, 3) of a layer's clusters, given per head, one head after another."""
    counts = list(map(len, clusters))
    heads = np.repeat(np.arange(len(clusters)), counts)
    return np.stack([np.full(len(heads), layer), heads, np.concatenate([*clusters])], axis=1)


def table_column(name: str, tables: Sequence[ClusterTable], keys: ClusterKeys) -> NDArray[np.int64]:
    """Return `sizes`, `checksums` or `homes` of clusters, (n,); `tables` has one table per layer."""
    layers, heads, clusters = key_array(keys).T
    found = np.empty(len(layers), np.int64)
    for layer in np.unique(layers).tolist():
        own = layers == layer
        found[own] = getattr(tables[layer], name)[heads[own], clusters[own]]
    return found
