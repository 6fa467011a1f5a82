"""What is known of one layer's clusters, small enough to stay in memory: sizes, variances, where they begin on flash.

Rows are KV heads, columns clusters in the order they were made. The update formulas are the incremental ones
(DynaKV §4.2). Tensor letters: G KV heads, C room for clusters. Knows nothing of keys, files or budgets.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int, int]
"""A cluster: layer, head, number."""
Keys = Sequence[Key] | NDArray[np.int64]
"""Some clusters, as an array (n, 3) or what becomes one."""

_COLUMNS = 64


class ClusterTable:
    """Arrays (G, C), valid in a head's first `count` columns.

    `sizes`: entries, buffered ones not counted. `variances`: mean squared distance of the keys to their centroid.
    `flagged`: waits for its split. `checksums`: sum of the entries' words modulo 2⁶⁴, signed. `homes`: the first half
    pool on flash, `more` the further ones of clusters that outgrew it.
    """

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.count: NDArray[np.int64] = np.zeros(heads, np.int64)
        self.sizes: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.variances: NDArray[np.float64] = np.zeros((heads, 0), np.float64)
        self.flagged: NDArray[np.bool_] = np.zeros((heads, 0), np.bool_)
        self.checksums: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.homes: NDArray[np.int64] = np.zeros((heads, 0), np.int64)
        self.more: dict[tuple[int, int], list[int]] = {}

    @property
    def columns(self) -> int:
        """C, room for clusters."""
        return int(self.sizes.shape[1])

    def open(self, head: int, home: int) -> int:
        """A new, empty cluster of a head, whose first half pool is `home`; returns its number."""
        if self.count[head] == self.columns:
            self._widen()
        number = int(self.count[head])
        self.count[head] += 1
        self.homes[head, number] = home
        return number

    def describe(self, head: int, cluster: int, size: int, variance: float) -> None:
        """Set what was found for a cluster made anew; it is not flagged then."""
        self.sizes[head, cluster] = size
        self.variances[head, cluster] = variance
        self.flagged[head, cluster] = False

    def halves(self, head: int, cluster: int) -> list[int]:
        """The half pools of a cluster, in order."""
        return [int(self.homes[head, cluster]), *self.more.get((head, cluster), ())]

    def tentative(self, head: int, cluster: int, squared_distance: float) -> float:
        """The variance that a cluster would have with one more key, so far from its centroid; changes nothing."""
        size = int(self.sizes[head, cluster])
        grown = size * self.variances[head, cluster] + size / (size + 1) * squared_distance
        return float(grown / (size + 1))

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Copies of the arrays, `more` among them as rows (head, cluster, half)."""
        more = [(head, cluster, half) for (head, cluster), halves in self.more.items() for half in halves]
        names = ("count", "sizes", "variances", "flagged", "checksums", "homes")
        return {name: getattr(self, name).copy() for name in names} | {
            "more": np.array(more, np.int64).reshape(-1, 3)
        }

    def restore(self, state: dict[str, NDArray[np.generic]]) -> None:
        """Take over what `state` gave."""
        for name, array in state.items():
            if name != "more":
                setattr(self, name, array)
        for head, cluster, half in state["more"].tolist():
            self.more.setdefault((head, cluster), []).append(half)

    def _widen(self) -> None:
        more = max(_COLUMNS, self.columns)
        for name in ("sizes", "variances", "flagged", "checksums", "homes"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((self.heads, more), array.dtype)], axis=1))


def as_keys(keys: Keys) -> NDArray[np.int64]:
    """Clusters as an array (n, 3)."""
    return np.asarray(keys, np.int64).reshape(-1, 3)


def named(keys: NDArray[np.int64]) -> list[Key]:
    """An array (n, 3) of clusters as single ones."""
    return [(layer, head, cluster) for layer, head, cluster in keys.tolist()]


def keys_of(layer: int, clusters: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Some `clusters` of each head of a layer, one head after the other, (n, 3)."""
    counts = list(map(len, clusters))
    heads = np.repeat(np.arange(len(clusters)), counts)
    return np.stack([np.full(len(heads), layer), heads, np.concatenate([*clusters])], axis=1)


def column(name: str, tables: Sequence[ClusterTable], keys: Keys) -> NDArray[np.int64]:
    """`sizes`, `checksums` or `homes` of clusters, (n,); `tables` are the layers'."""
    layers, heads, clusters = as_keys(keys).T
    found = np.empty(len(layers), np.int64)
    for layer in np.unique(layers).tolist():
        own = layers == layer
        found[own] = getattr(tables[layer], name)[heads[own], clusters[own]]
    return found
