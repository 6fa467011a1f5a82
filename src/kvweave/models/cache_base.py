"""What every cache has in common that a model can go on from, token by token: where new rows stand, how they attend.

The adapter and its hooks know a cache by this class alone. Knows nothing of what a cache holds.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvweave.models.attention import AttentionHook, RowPlan


class AppendableCache(Cache):
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


class PrefixContext(Protocol):
    """What a prompt's canvas, on which it begins at row 0, has to know of the text before it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of it."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """The system prefix that it begins with, which stored KV of chunks was made behind."""
        ...

    def positions(self, count: int) -> Tensor:
        """The rotary positions (count,) of as many rows that follow it."""
        ...

    def plan(self, rows: Tensor) -> RowPlan:
        """How prompt positions (T,), ascending, attend: to this text, and causally to the prompt."""
        ...


class LayerSink(AttentionHook, Protocol):
    """Takes a prompt's KV over, layer by layer, from the pass that it watches; see `FusedCache.hand_over`."""

    @property
    def bounded(self) -> bool:
        """Whether KV of other layers may not be held beside what it takes, not even to be stored."""
        ...

    def begin(self, positions: Tensor) -> None:
        """A prompt at rotary positions (N,) comes; of one that came before and was given up, nothing counts."""
        ...

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy a layer's keys and values (G, N, D), with which the canvas is done.

        A layer that was not seen in this pass is of no use: whoever looked at the prompt beforehand has left it.
        """
        ...
