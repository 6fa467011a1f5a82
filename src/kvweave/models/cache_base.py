"""Interfaces between a model pass and a cache: `AppendableCache`, `PrefixContext` and `LayerSink`.

An `AppendableCache` knows the positions of appended rows and how they attend. The adapter and its hooks know a
cache by this class alone.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvweave.models.attention import RowPlan
from kvweave.models.hooks import AttentionHook


class AppendableCache(Cache):
    """A request's KV that a model can continue token by token.

    `positions` (N,) are the rotary positions of its prompt, the last one the largest. `continuation` makes the plan by
    which rows (T,) after the prompt attend; None means plain causal attention through the library's own masks.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], positions: Tensor) -> None:
        self.positions = positions
        self.continuation: Callable[[Tensor], RowPlan] | None = None
        indices = torch.arange(positions.numel(), device=positions.device)
        self._at_indices = torch.equal(positions, indices)
        super().__init__(layers=list(layers))

    @property
    def plain(self) -> bool:
        """Whether every token's position is its index, and rows after the prompt attend as the model alone would."""
        return self._at_indices and self.continuation is None

    def __bool__(self) -> bool:
        """Whether computing the text again from scratch gives the same KV.

        When a text outgrows the short LongRoPE frequencies, the library's `generate` silently drops a cache that is true.
        """
        return self.plain

    def positions_of(self, rows: Tensor) -> Tensor:
        """Return the rotary positions of rows (T,); rows after the prompt continue from its last position."""
        if not self.positions.numel():
            return rows
        inside = rows.clamp(max=self.positions.numel() - 1)
        return self.positions[inside] + (rows - inside)

    def next_rows(self, count: int) -> Tensor:
        """Return the rows of the next `count` appended tokens, (count,)."""
        start = self.get_seq_length()
        return torch.arange(start, start + count, device=self.positions.device)

    def before_layer(self, layer: int) -> None:
        """Called when a layer's attention module starts, before its projections."""


class PrefixContext(Protocol):
    """The text before a prompt whose own cache starts at row 0."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole text."""
        ...

    @property
    def prefix(self) -> tuple[int, ...]:
        """The system prefix that it starts with; stored chunk KV was computed after it."""
        ...

    def positions(self, count: int) -> Tensor:
        """Return the rotary positions (count,) of the rows that follow the text."""
        ...

    def plan(self, rows: Tensor) -> RowPlan:
        """Return how prompt positions (T,), ascending, attend: to this text, and causally to the prompt."""
        ...


class LayerSink(AttentionHook, Protocol):
    """Receives a prompt's KV layer by layer from the pass that it hooks, so that the full KV is never in memory.

    See `FusedCache.stream_to`.
    """

    @property
    def bounded(self) -> bool:
        """Whether memory is bounded, so that the caller must not keep other layers' KV, not even to store it."""
        ...

    def begin(self, positions: Tensor) -> None:
        """Start a prompt at rotary positions (N,); discard an earlier prompt that was not finished."""
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy a layer's keys and values (G, N, D), which the cache drops afterwards.

        Ignore a layer that this pass did not show to `on_layer`: it comes from an earlier, partial pass.
        """
        ...
