"""Hooks on one forward pass: what each layer shows them, and the ones that record attention.

An `AttentionHook` sees queries, keys and values before a layer attends. Those here read only: the output of a complete pass stays
bit-identical. They may end the pass with `StopForward`. The cost of recording grows with the rows asked for, not with the rows computed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.ops.attention import AttentionSettings
from kvweave.ops.scores import attention_shares, mean_attention, peak_attention


class StopForward(Exception):
    """Raised by a hook to end the pass."""


@dataclass(frozen=True, slots=True)
class LayerQueries:
    """The inputs of one layer's attention, queries and keys rotated.

    Read only. A hook may change keys and values of rows that the pass does not compute in a cache that is the request's own
    (`recipes/shift.py`); it comes before the hooks that shall see the change.

    Attributes:
        layer: index of the layer.
        rows: prompt positions (T,) of the queries, ascending.
        query: (B, H, T, D).
        keys, values: (B, G, N, D), in prompt order, the pass' own rows among them.
        settings: how the layer attends.
    """

    layer: int
    rows: Tensor
    query: Tensor
    keys: Tensor
    values: Tensor
    settings: AttentionSettings


class AttentionHook(Protocol):
    """Sees the attention inputs of every layer of a pass."""

    def on_layer(self, queries: LayerQueries) -> None:
        """Called once per layer, in order, before the layer attends; may raise StopForward."""
        ...


@dataclass(frozen=True, slots=True)
class StopAtLayer:
    """Attention hook that ends the pass at a layer, after the hooks listed before it have seen that layer.

    The layer's keys and values are in the cache by then.
    """

    layer: int

    def on_layer(self, queries: LayerQueries) -> None:
        """Raise StopForward at the layer."""
        if queries.layer == self.layer:
            raise StopForward


class AttentionProbe:
    """Records the softmax weights of rows on keys, per layer, averaged over rows and query heads, in one pass.

    Grouped heads, sliding windows and soft caps count as in the layer itself.

    Args:
        rows: prompt positions (R,), a subset of the rows that the pass computes.
        columns: (first, end) of the prompt positions that the softmax runs over and that are recorded; None for
            all that a row sees. With the context's bounds, system prompt and question are left out, so that a
            layer whose heads attend to the first token counts as much as the others (ProphetKV eq. 7).
        layers: layers to record; None for all. The others cost nothing.
        lift_windows: record what the rows would attend to if the recorded layers had no sliding windows. The pass itself
            attends as before.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        columns: tuple[int, int] | None = None,
        layers: Collection[int] | None = None,
        lift_windows: bool = False,
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._layers = layers
        self._lift_windows = lift_windows
        self._indices: Tensor | None = None
        self._recorded: dict[int, Tensor] = {}

    def on_layer(self, queries: LayerQueries) -> None:
        """Record one layer. Raises InvalidRequest if the pass does not compute one of the rows."""
        if self._layers is not None and queries.layer not in self._layers:
            return
        if self._indices is None:
            self._indices = _indices_of(self._rows, queries.rows)
        self._recorded[queries.layer] = mean_attention(
            queries.query[:, :, self._indices],  # (1, H, R, D)
            queries.rows[self._indices],
            queries.keys,
            _lifted(queries.settings, self._lift_windows),
            self._columns,
        )[0]

    @property
    def weights(self) -> Tensor:
        """(L, keys) float32 on the model's device, of the recorded layers in order; read it after the pass."""
        return torch.stack([self._recorded[layer] for layer in sorted(self._recorded)])


class AttentionShares:
    """Records the share of each row's attention that goes to each part of the prompt, averaged over layers and heads.

    Args:
        rows: prompt positions (R,), a subset of the rows that the pass computes.
        parts: (start, end) of each part's prompt positions.
    """

    def __init__(self, rows: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        self._rows = rows
        self._parts = parts
        self._sum: Tensor | None = None
        self._layers = 0

    def on_layer(self, queries: LayerQueries) -> None:
        """Add one layer. Raises InvalidRequest if the pass does not compute one of the rows."""
        indices = _indices_of(self._rows, queries.rows)
        members = torch.zeros(queries.keys.shape[2], len(self._parts), device=queries.keys.device)
        for number, (start, end) in enumerate(self._parts):
            members[start:end, number] = 1.0
        query, rows = queries.query[:, :, indices], queries.rows[indices]
        shares = attention_shares(query, rows, queries.keys, members, queries.settings)[0]
        self._sum = shares if self._sum is None else self._sum + shares
        self._layers += 1

    @property
    def shares(self) -> Tensor:
        """(R, parts) float32 on the model's device; read it after the pass."""
        assert self._sum is not None, "the pass has not run"
        return self._sum / self._layers


class PeakAttention:
    """Records the largest weight that any row, head and layer of a pass puts on each key (KVzip's importance).

    `layers` and `lift_windows` are as in `AttentionProbe`.
    """

    def __init__(self, *, layers: Collection[int] | None = None, lift_windows: bool = False) -> None:
        self._layers, self._lift_windows = layers, lift_windows
        self._peak: Tensor | None = None

    def on_layer(self, queries: LayerQueries) -> None:
        """Include one layer, if it is one of those to record."""
        if self._layers is not None and queries.layer not in self._layers:
            return
        settings = _lifted(queries.settings, self._lift_windows)
        peak = peak_attention(queries.query, queries.rows, queries.keys, settings)[0]
        self._peak = peak if self._peak is None else torch.maximum(self._peak, peak)

    @property
    def weights(self) -> Tensor:
        """(keys,) float32 on the model's device; read it after the pass."""
        assert self._peak is not None, "the pass has not run"
        return self._peak


def _lifted(settings: AttentionSettings, lift_windows: bool) -> AttentionSettings:
    return replace(settings, window=None) if lift_windows else settings


def _indices_of(rows: Tensor, computed: Tensor) -> Tensor:
    """Return the index of each of `rows` among the ascending rows that a pass computes.

    Raises InvalidRequest if the pass does not compute one of them.
    """
    rows = rows.to(computed.device)
    indices = torch.searchsorted(computed, rows).clamp_(max=max(0, computed.numel() - 1))
    if rows.numel() and (computed.numel() == 0 or not torch.equal(computed[indices], rows)):
        missing = rows[~torch.isin(rows, computed)].tolist()
        raise InvalidRequest(
            f"rows {missing[:5]} cannot be recorded, since this pass does not compute them; choose rows of the pass"
        )
    return indices
