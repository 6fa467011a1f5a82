"""Passes in which some rows are not projected, because their queries, keys and values are stored (PerCache §4.2.2).

All rows run through all layers. A layer's q_proj, k_proj and v_proj receive only the rows without stored queries. The stored
queries, unrotated, fill the gaps before the model's own rotation; stored keys and values stay in the cache as placed. Hooks do
this for the length of one pass; the model stays as it is. Knows nothing of stores or recipes.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvweave.errors import InvalidRequest
from kvweave.models.attention import attention_modules
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.rotary import Rotation, RotationRecorder
from kvweave.models.support import Geometry
from kvweave.types import ChunkKV

Projections = tuple[tuple[nn.Module, ...], ...]
"""q_proj, k_proj and v_proj of each layer, in order."""


def separate_projections(
    model: PreTrainedModel, geometry: Geometry, rotation: Rotation
) -> Projections | None:
    """Return the modules that make each layer's queries, keys and values; None if they cannot run on some rows alone.

    They cannot in a family with other modules (mostly fused ones) or with outputs beyond the heads (a gate). Nor where a layer
    rotates a part of each head or nothing, since stored queries are filled in at the rotation.
    """
    heads = int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0))
    widths = [count * geometry.head_width for count in (heads, geometry.kv_heads, geometry.kv_heads)]
    if any(layer.width != geometry.head_width for layer in rotation.layers):
        return None
    found = {}
    for attention in attention_modules(model).values():
        modules = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if [getattr(module, "out_features", None) for module in modules] != widths:
            return None
        found[int(attention.layer_idx)] = tuple(module for module in modules if module is not None)  # type: ignore[arg-type]
    return tuple(found[layer] for layer in sorted(found))


class StoredQueries(RotationRecorder):
    """While active, projects only `projected` (W,) of a pass's rows (T,), both prompt positions, ascending.

    The other rows get the queries of the placed `spans`; their keys and values are those in the cache. Raises
    InvalidRequest for a row that is neither projected nor stored with its queries.
    """

    def __init__(
        self,
        module: ModuleType,
        projections: Projections,
        spans: Sequence[PlacedSpan],
        rows: Tensor,
        projected: Tensor,
    ) -> None:
        super().__init__(module)
        self.projected = torch.searchsorted(rows, projected)  # (W,), indices among the rows
        self._projections = projections
        self._rows = rows.numel()
        self._sources = _stored_rows(spans, rows, torch.isin(rows, projected, invert=True))
        self._layer = -1
        self._narrowed = False
        self._hooks = ExitStack()

    def __enter__(self) -> "StoredQueries":
        super().__enter__()
        for layer, modules in enumerate(self._projections):
            for module in modules:
                self._hooks.callback(module.register_forward_pre_hook(partial(self._narrow, layer)).remove)
                self._hooks.callback(module.register_forward_hook(self._widen).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        super().__exit__(kind, error, trace)

    def _narrow(self, layer: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Project (1, W, hidden) of (1, T, hidden); leave inputs without all rows as they are (last row of the last layer)."""
        (hidden,) = args
        if not self._is_of_pass(hidden, 1):
            return args
        self._layer, self._narrowed = layer, True
        return (hidden.index_select(1, self.projected),)

    def _widen(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Put the projected rows among zeros, (1, T, width), which stored ones replace later."""
        if not self._narrowed or threading.get_ident() != self._thread:
            return output
        self._narrowed = False
        return output.new_zeros(1, self._rows, output.shape[-1]).index_copy_(1, self.projected, output)

    def _record_and_apply(
        self, q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Fill in the stored queries, then rotate."""
        if self._is_of_pass(q, 2):
            q = q.clone()  # (1, H, T, D)
            for indices, inside, kv in self._sources:
                q.index_copy_(2, indices, kv.layer_queries(self._layer)[None, :, inside].to(q.device))
        return super()._record_and_apply(q, k, cos, *args, **kwargs)

    def _is_of_pass(self, states: Tensor, dimension: int) -> bool:
        """Whether a tensor belongs to the pass and has all its rows in this dimension."""
        return threading.get_ident() == self._thread and states.shape[dimension] == self._rows


def _stored_rows(
    spans: Sequence[PlacedSpan], rows: Tensor, stored: Tensor
) -> list[tuple[Tensor, Tensor, ChunkKV]]:
    """Return, for each span with queries, the indices (n,) of the rows that use them and their positions in the span.

    `stored` (T,) marks the rows that use stored queries.
    """
    sources = []
    for span in spans:
        if span.kv.queries is None:
            continue
        indices = (stored & (rows >= span.start) & (rows < span.start + span.kv.tokens)).nonzero()[:, 0]
        if indices.numel():
            sources.append((indices, (rows[indices] - span.start).cpu(), span.kv))
    found, expected = sum(indices.numel() for indices, _, _ in sources), int(stored.sum())
    if found != expected:
        raise InvalidRequest(
            f"{expected - found} of {rows.numel()} rows are neither projected nor stored with their queries; have them projected"
        )
    return sources
