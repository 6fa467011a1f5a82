"""What every cache has in common that a model can go on from, token by token: where new rows stand, how they attend.

The adapter and its hooks know a cache by this class alone. Knows nothing of what a cache holds.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvweave.models.attention import RowPlan


class Continued(Cache):
    """A request's KV behind `positions` (N,), the rotary positions of its prompt, the last one the largest.

    `continuation` makes the plan by which rows behind the prompt attend, (T,) to plan; None means plain causal
    attention through the library's own masks.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], positions: Tensor) -> None:
        self.positions = positions
        self.continuation: Callable[[Tensor], RowPlan] | None = None
        indices = torch.arange(positions.numel(), device=positions.device)
        self._at_indices = torch.equal(positions, indices)
        super().__init__(layers=list(layers))

    @property
    def plain(self) -> bool:
        """Whether every token stands at its index and what follows the prompt attends as the model alone would."""
        return self._at_indices and self.continuation is None

    def __bool__(self) -> bool:
        """Whether computing the text anew gives the same: LongRoPE families' `generate` then drops a true cache.

        It does so when the text outgrows the short frequencies, by the cache's truth value and without a word.
        """
        return self.plain

    def positions_of(self, rows: Tensor) -> Tensor:
        """Rotary positions of rows (T,); rows behind the prompt go on from its last position."""
        if not self.positions.numel():
            return rows
        inside = rows.clamp(max=self.positions.numel() - 1)
        return self.positions[inside] + (rows - inside)

    def next_rows(self, count: int) -> Tensor:
        """Where the next `count` appended tokens will stand, (count,)."""
        start = self.get_seq_length()
        return torch.arange(start, start + count, device=self.positions.device)

    def before_layer(self, layer: int) -> None:
        """Called as a layer's attention begins, before it projects anything."""
