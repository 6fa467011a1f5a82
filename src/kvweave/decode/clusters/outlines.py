"""Outlines of a layer's entries: the little that is kept in memory of each, to choose by and to stand for it while it is not read.

An entry's outline is its cluster, of which mean key and mean value are kept, and a code of 2 bits for each of the directions in which
keys differ most from their cluster's. Single parts are known: to rank entries by codes (PQCache, arXiv 2407.12820), and to estimate the
attention to unread clusters by their means (RetroInfer, arXiv 2505.02922). Tensor letters: G KV heads, R query rows of a head's group,
n entries, C clusters, D head width, d directions. Knows nothing of files or budgets.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from kvweave.ops.attention import apply_softcap
from kvweave.ops.kmeans import k_means, members

DIRECTIONS: Final = 32
"""The most directions with a code; fewer in narrower heads."""

_CODES_PER_BYTE: Final = 4
_FLOOR: Final = 0.02  # of the queries' mean energy, in every direction: queries to come may ask other things
_SEGMENT: Final = 4096  # entries that are clustered together: the time grows with their square
_BLOCK: Final = 2048  # entries whose codes are unpacked at a time, into the processor's cache
_MOST_ROWS: Final = 32  # that ask each entry; with more, as in a prompt, they ask clusters by mean keys
_LEAST: Final = 1e-12
_STEP_SHARE: Final = 0.25  # of the mean step, at least: a few first keys say nothing of some directions
_LARGEST: Final = 65504.0  # in half precision
_UNITS: Final = 4 ** torch.arange(_CODES_PER_BYTE)  # of a byte's codes
_MIDDLE: Final = 1.5  # codes 0 to 3 mean -1.5 to 1.5 steps


class Outlines:
    """Outlines of G heads of width D, in memory that grows by eighths.

    Keys count from `origin`, the mean of each head's first keys: half precision would not hold a channel that is large in all of them.

    Attributes:
        clusters: columns in use; a head may have fewer clusters.
    """

    def __init__(self, heads: int, width: int) -> None:
        self._heads, self._width = heads, width
        self._directions = min(DIRECTIONS, width) // _CODES_PER_BYTE * _CODES_PER_BYTE
        self.clusters = self._entries = 0
        self.origin = torch.zeros(heads, width)
        self._seen = torch.zeros(heads, width, width)  # |k @ seen|² is the mean square of a query's logit
        self._value_scale = torch.ones(heads)
        self._into = torch.zeros(heads, width, self._directions)
        self._out = torch.zeros(heads, self._directions, width)  # with the step between codes
        self._keys = torch.zeros(heads, 0, width, dtype=torch.float16)  # of clusters, (G, C, D)
        self._values = torch.zeros(heads, 0, width, dtype=torch.float16)
        self._norms = torch.zeros(heads, 0)  # of clusters as points, see `points`
        self._owners = torch.zeros(heads, 0, dtype=torch.int32)  # of entries, (G, n)
        self._codes = torch.zeros(heads, self._directions // _CODES_PER_BYTE, 0, dtype=torch.uint8)

    @property
    def resident_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _TENSORS)

    def growth_bytes(self, clusters: int, entries: int) -> int:
        """Return the extra memory needed for so many more clusters and entries; old memory is released only after a copy."""
        growing = self._growing(clusters, entries)
        return sum(self._bytes_of(name, capacity) for name, capacity in growing.items())

    def next_growth_bytes(self, entries: int) -> int:
        """Return how much larger everything is once it has grown next, for so many more; 0 while there is nothing."""
        if not self._entries:
            return 0
        room = (_OF_CLUSTERS, self._keys.shape[1]), (_OF_ENTRIES, self._owners.shape[1])
        return sum(
            self._bytes_of(name, _capacity(now + entries) - now) for names, now in room for name in names
        )

    def make_room(self, clusters: int, entries: int) -> None:
        """Allocate memory for so many more clusters and entries, once."""
        for name, capacity in self._growing(clusters, entries).items():
            self._grow(name, capacity)

    # Building

    def learn_space(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Set what keys count from, and how far apart they are, from the first keys and values (G, n, D).

        Two keys are as far apart as the queries (H, T, D) find them, if any are known, so that nothing is spent on what no query asks.
        """
        self.origin = keys.mean(1)
        asked = keys - self.origin[:, None]
        if queries is not None and queries.shape[1]:
            asked = queries.reshape(self._heads, -1, self._width)
        energy, axes = torch.linalg.eigh(asked.transpose(1, 2) @ asked / asked.shape[1])
        energy = energy.clamp(min=0)
        energy = energy + _FLOOR * energy.mean(-1, keepdim=True) + _LEAST
        self._seen = axes * energy.sqrt()[:, None]
        spread = _spread((keys - self.origin[:, None]) @ self._seen)
        least = (
            1e-6 * values.square().sum(-1).mean(1) + _LEAST
        )  # values that are all the same would drown the keys
        scale = spread / torch.maximum(_spread(values), least)
        self._value_scale = scale.sqrt()  # keys and values count alike

    def learn_codes(self, keys: Tensor, owners: Tensor) -> None:
        """Set the directions of codes and their steps, from keys (G, n, D) and each one's cluster (G, n)."""
        rest = self._rest(keys, owners) @ self._seen
        _, main = torch.linalg.eigh(rest.transpose(1, 2) @ rest)
        main = main[..., self._width - self._directions :]  # (G, D, d)
        energies = (rest @ main).square().mean(1, keepdim=True)  # (G, 1, d)
        least = _STEP_SHARE**2 * energies.mean(-1, keepdim=True)
        step = torch.maximum(energies, least).sqrt().clamp(min=_LEAST)
        self._into = self._seen @ main / step
        self._out = (main * step).transpose(1, 2) @ torch.linalg.inv(self._seen)

    def groups(self, keys: Tensor, values: Tensor, mean_entries: int, largest: int) -> list[list[Tensor]]:
        """Return for each head the numbers of each cluster's entries, of entries (G, n, D): by k-means of about so many, at most `largest`.

        Stretches of 4,096 entries share no cluster.
        """
        found: list[list[Tensor]] = [[] for _ in range(self._heads)]
        for first in range(0, keys.shape[1], _SEGMENT):
            own = slice(first, first + _SEGMENT)
            points = self.points(keys[:, own], values[:, own])
            assigned = k_means(points, -(-points.shape[1] // mean_entries))
            for head, groups in enumerate(found):
                groups += [first + each for each in members(points[head], assigned[head], largest)]
        return found

    def points(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return entries (G, n, D) as points (G, n, 2 · D), which are as far apart as entries count as different."""
        scaled = values * self._value_scale[:, None, None]
        return torch.cat([(keys - self.origin[:, None]) @ self._seen, scaled], dim=-1)

    # Growing, in the room that was made

    def put_cluster(self, head: int, cluster: int, key: Tensor, value: Tensor) -> None:
        """Set mean key and value (D,) of a new cluster; its key stays as it is, since codes are relative to it."""
        self.clusters = max(self.clusters, cluster + 1)
        self._keys[head, cluster] = (key - self.origin[head]).clamp(-_LARGEST, _LARGEST)
        self._put_value(head, cluster, value)

    def add_entries(self, keys: Tensor, owners: Tensor) -> None:
        """Add entries with keys (G, n, D) to clusters (G, n) that are there."""
        end = self._entries + keys.shape[1]
        codes = (
            ((self._rest(keys, owners) @ self._into).floor() + 2)
            .clamp(0, 3)
            .byte()
            .unflatten(-1, (-1, _CODES_PER_BYTE))
        )
        packed = sum(codes[..., place] << 2 * place for place in range(_CODES_PER_BYTE))  # (G, n, d/4)
        self._codes[..., self._entries : end] = packed.transpose(1, 2)
        self._owners[:, self._entries : end] = owners
        self._entries = end

    def add_value(self, head: int, cluster: int, value: Tensor, size: int) -> None:
        """Let the mean value of a cluster, now of `size` entries, follow a new entry's value (D,)."""
        mean = self._values[head, cluster].float()
        self._put_value(head, cluster, mean + (value - mean) / size)

    def mean_key(self, head: int, cluster: int) -> Tensor:
        """Return the mean key (D,) of a cluster, as it is known."""
        return self._keys[head, cluster].float() + self.origin[head]

    def nearest(self, keys: Tensor, values: Tensor, open_: Tensor) -> Tensor:
        """Return for each entry (G, n, D) the nearest cluster of those that are `open_` (G, C), (G, n)."""
        seen = (keys - self.origin[:, None]) @ self._seen @ self._seen.transpose(1, 2)
        scaled = values * self._value_scale.square()[:, None, None]
        products = self._keys[:, : self.clusters].float() @ seen.transpose(1, 2)  # those of points
        products += self._values[:, : self.clusters].float() @ scaled.transpose(1, 2)
        distances = self._norms[:, : self.clusters, None] - 2 * products  # (G, C, n)
        return distances.masked_fill(~open_[:, : self.clusters, None], float("inf")).argmin(1)

    # Asking

    def log_masses(self, query: Tensor, sizes: Tensor, softcap: float | None) -> Tensor:
        """Return the log of the sum of the exponentiated logits of each cluster's entries, (G, R, C), by their outlines.

        `query` is (G, R, D) float32, scaled; `sizes` (G, C) are 0 where a head has no cluster, which gets −inf. With more than 32
        rows, as in a prompt, entries count by their cluster's mean key alone.
        """
        common = query @ self.origin[..., None]  # (G, R, 1)
        means = common + query @ self._keys[:, : self.clusters].float().transpose(1, 2)
        if query.shape[1] > _MOST_ROWS:
            return apply_softcap(means, softcap) + sizes.log()[:, None]
        asked = query @ self._out.transpose(1, 2)  # (G, R, d)
        means -= _MIDDLE * asked.sum(-1, keepdim=True)
        # As the bytes' masks give them: the first code of each byte, the second of each, …
        asked = (asked.unflatten(-1, (-1, _CODES_PER_BYTE)) / _UNITS).transpose(-1, -2).flatten(-2)
        masses, highest = torch.zeros_like(means), means.new_full((*means.shape[:2], 1), float("-inf"))
        for first in range(0, self._entries, _BLOCK):
            own = slice(first, min(first + _BLOCK, self._entries))
            owners = self._owners[:, own].long()[:, None].expand(-1, query.shape[1], -1)
            logits = means.gather(2, owners).baddbmm_(asked, self._unpacked(own))
            logits = apply_softcap(logits, softcap)
            higher = torch.maximum(highest, logits.amax(-1, keepdim=True))
            masses *= (highest - higher).exp()
            masses.scatter_add_(2, owners, logits.sub_(higher).exp_())
            highest = higher
        return masses.log() + highest

    def _unpacked(self, own: slice) -> Tensor:
        """Return the codes of some entries, (G, d, n) float32: for each place in a byte, those of all bytes, in that place's units."""
        codes = self._codes[..., own]  # (G, d/4, n)
        found = torch.empty(len(codes), self._directions, codes.shape[2])
        for place, out in enumerate(found.split(codes.shape[1], 1)):
            out.copy_(codes & (3 << 2 * place))
        return found

    def mean_values(self) -> Tensor:
        """Return each cluster's mean value, (G, C, D) in half precision, read-only."""
        return self._values[:, : self.clusters]

    # Persisting

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors, for `restore`."""
        found = {name: getattr(self, name) for name in _TENSORS}
        found["_codes"] = self._codes.transpose(1, 2)
        found |= {name: found[name][:, : self.clusters] for name in _OF_CLUSTERS}
        found |= {name: found[name][:, : self._entries] for name in _OF_ENTRIES}
        room = torch.tensor([self._keys.shape[1], self._owners.shape[1]])
        return {name.lstrip("_"): tensor.clone() for name, tensor in found.items()} | {"room": room}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state, with the room that was there: a text that goes on must not need more memory than before."""
        for name in _TENSORS:
            setattr(self, name, state[name.lstrip("_")].clone())
        self._codes = self._codes.transpose(1, 2).contiguous()
        self.clusters, self._entries = self._keys.shape[1], self._owners.shape[1]
        for names, capacity in zip((_OF_CLUSTERS, _OF_ENTRIES), state["room"].tolist(), strict=True):
            for name in names:
                self._grow(name, capacity)

    def _rest(self, keys: Tensor, owners: Tensor) -> Tensor:
        """Return what keys (G, n, D) are beyond the mean keys of their clusters (G, n)."""
        return keys - self.origin[:, None] - _rows_of(self._keys, owners).float()

    def _put_value(self, head: int, cluster: int, value: Tensor) -> None:
        self._values[head, cluster] = value.clamp(-_LARGEST, _LARGEST)
        key, value = self._keys[head, cluster].float(), self._values[head, cluster].float()
        spread = key @ self._seen[head], value * self._value_scale[head]
        self._norms[head, cluster] = sum(part.square().sum() for part in spread)

    def _growing(self, clusters: int, entries: int) -> dict[str, int]:
        """Return the tensors that are too short for so many more clusters and entries, with their new lengths."""
        needed = (_OF_CLUSTERS, self.clusters + clusters), (_OF_ENTRIES, self._entries + entries)
        return {
            name: _capacity(count)
            for names, count in needed
            for name in names
            if count > getattr(self, name).shape[_axis(name)]
        }

    def _grow(self, name: str, capacity: int) -> None:
        old: Tensor = getattr(self, name)
        axis = _axis(name)
        grown = old.new_zeros(*old.shape[:axis], capacity, *old.shape[axis + 1 :])
        grown.narrow(axis, 0, old.shape[axis]).copy_(old)
        setattr(self, name, grown)

    def _bytes_of(self, name: str, count: int) -> int:
        like: Tensor = getattr(self, name)
        axis = _axis(name)
        return count * like.shape[:axis].numel() * like.shape[axis + 1 :].numel() * like.itemsize


_OF_CLUSTERS: Final = ("_keys", "_values", "_norms")
_OF_ENTRIES: Final = ("_owners", "_codes")
_TENSORS: Final = ("origin", "_seen", "_value_scale", "_into", "_out", *_OF_CLUSTERS, *_OF_ENTRIES)


def _axis(name: str) -> int:
    """Return the axis of clusters or entries; the codes' is the last, so that what is read together lies together."""
    return 2 if name == "_codes" else 1


def _capacity(count: int) -> int:
    """Leave room for an eighth as many again, so that memory is rarely copied."""
    return count + max(16, count // 8)


def _spread(points: Tensor) -> Tensor:
    """Return the mean squared distance of points (G, n, D) from their mean, (G,)."""
    return (points - points.mean(1, keepdim=True)).square().sum(-1).mean(1)


def _rows_of(rows: Tensor, own: Tensor) -> Tensor:
    """Return rows (G, n, D) of (G, C, D) by their numbers (G, n)."""
    return rows.gather(1, own.long()[..., None].expand(-1, -1, rows.shape[2]))
