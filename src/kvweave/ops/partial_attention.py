"""Attention over keys that arrive in portions: a running softmax, so that no portion has to be kept.

Exact up to float32 rounding, whatever the order and size of the portions. Tensor letters: B = 1, H query heads, G KV
heads, T query rows, R = H/G · T rows of one KV head, n keys of a portion, D head width. Knows nothing of files or
clusters.
"""

import torch
from torch import Tensor

from kvweave.ops.attention import apply_softcap


class PartialAttention:
    """Softmax attention of query (1, H, T, D) over KV heads G, summed portion by portion in float32."""

    def __init__(self, query: Tensor, kv_heads: int, *, scaling: float, softcap: float | None = None) -> None:
        self._shape, self._dtype = query.shape, query.dtype
        rows = query.shape[1] // kv_heads * query.shape[2]
        self.query = query[0].reshape(kv_heads, rows, -1).float() * scaling  # (G, R, D)
        self.softcap = softcap
        self._max = query.new_full((kv_heads, rows, 1), float("-inf"), dtype=torch.float32)
        self._mass = torch.zeros_like(self._max)
        self._sum = torch.zeros_like(self.query)

    @property
    def log_mass(self) -> Tensor:
        """The log of the sum of all exponentiated logits so far, (G, R)."""
        return (self._mass.log() + self._max)[..., 0]

    def add(self, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> None:
        """Include keys and values (G, n, D) of any float dtype.

        `visible` masks keys, (G or 1, T or 1, n); a dimension of 1 covers all KV heads or all rows.
        """
        if not keys.shape[1]:
            return
        logits = self.logits(keys)
        if visible is not None:
            logits = logits.masked_fill_(~self._per_row(visible), float("-inf"))
        self.add_logits(logits, values)

    def logits(self, keys: Tensor) -> Tensor:
        """Return the query's logits on keys (G, n, D), scaled and soft-capped, (G, R, n)."""
        return apply_softcap(self.query @ keys.float().transpose(1, 2), self.softcap)

    def add_logits(self, logits: Tensor, values: Tensor) -> None:
        """Include values (G, n, D) with known logits (G, R, n), −inf for masked ones; overwrites the logits."""
        self._include(logits, values)

    def add_estimate(self, logits: Tensor, values: Tensor) -> None:
        """As `add_logits`, of what stands for entries that were not read."""
        self._include(logits, values)

    def result(self) -> Tensor:
        """Return the attention output (1, H, T, D) in the query's dtype; every row must have seen a key."""
        return (self._sum / self._mass).reshape(self._shape).to(self._dtype)

    def _include(self, logits: Tensor, values: Tensor) -> None:
        highest = torch.maximum(self._max, logits.amax(-1, keepdim=True))
        # A row that has seen no key has no maximum: shift it by 0, its weights are all zero.
        shift = highest.masked_fill(highest == float("-inf"), 0.0)
        rescale = (self._max - shift).exp()
        weights = logits.sub_(shift).exp_()
        self._mass = self._mass * rescale + weights.sum(-1, keepdim=True)
        self._sum = self._sum * rescale + weights @ values.float()
        self._max = highest

    def _per_row(self, visible: Tensor) -> Tensor:
        if visible.shape[1] == 1:
            return visible
        return visible.repeat(1, self.query.shape[1] // visible.shape[1], 1)  # (G or 1, R, n)
