"""Attention over keys that arrive in portions: the softmax is carried along, so that no portion is kept.

Exact up to float32 rounding whatever the order and size of the portions. Tensor letters: B = 1, H query heads, G KV
heads, T query rows, R = H/G · T rows of one KV head, n keys of a portion, D head width. Knows nothing of files or
clusters.
"""

import torch
from torch import Tensor


class PartialAttention:
    """Softmax attention of query (1, H, T, D) over KV heads G, summed up portion by portion in float32."""

    def __init__(self, query: Tensor, kv_heads: int, *, scaling: float, softcap: float | None = None) -> None:
        self._shape, self._dtype = query.shape, query.dtype
        rows = query.shape[1] // kv_heads * query.shape[2]
        self.query = query[0].reshape(kv_heads, rows, -1).float() * scaling  # (G, R, D)
        self.softcap = softcap
        self._most = query.new_full((kv_heads, rows, 1), float("-inf"), dtype=torch.float32)
        self._mass = torch.zeros_like(self._most)
        self._sum = torch.zeros_like(self.query)

    @property
    def log_mass(self) -> Tensor:
        """The log of the sum of all exponentiated logits so far, (G, R)."""
        return (self._mass.log() + self._most)[..., 0]

    def add(self, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> None:
        """Take in keys and values (G, n, D) of any float dtype.

        `visible` hides some, (G or 1, T or 1, n): where it is 1, all KV heads or all rows see alike.
        """
        if not keys.shape[1]:
            return
        logits = self.logits(keys)
        if visible is not None:
            logits = logits.masked_fill_(~self._spread(visible), float("-inf"))
        self.add_weighed(logits, values)

    def logits(self, keys: Tensor) -> Tensor:
        """What the query gives keys (G, n, D), scaled and capped, (G, R, n)."""
        return capped(self.query @ keys.float().transpose(1, 2), self.softcap)

    def add_weighed(self, logits: Tensor, values: Tensor) -> None:
        """Take in values (G, n, D) whose logits (G, R, n) are known, −inf for hidden ones; overwrites the logits."""
        most = torch.maximum(self._most, logits.amax(-1, keepdim=True))
        # A row that has seen nothing yet has no maximum: shift it by nothing, its weights are all zero.
        shift = most.masked_fill(most == float("-inf"), 0.0)
        kept = (self._most - shift).exp()
        weights = logits.sub_(shift).exp_()
        self._mass = self._mass * kept + weights.sum(-1, keepdim=True)
        self._sum = self._sum * kept + weights @ values.float()
        self._most = most

    def result(self) -> Tensor:
        """The attention output (1, H, T, D) in the query's dtype; every row must have seen a key."""
        return (self._sum / self._mass).reshape(self._shape).to(self._dtype)

    def _spread(self, visible: Tensor) -> Tensor:
        if visible.shape[1] == 1:
            return visible
        return visible.repeat(1, self.query.shape[1] // visible.shape[1], 1)  # (G or 1, R, n)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits under a soft cap, where there is one."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
