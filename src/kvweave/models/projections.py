"""A pass in which some rows are not projected: their queries, keys and values are stored (PerCache §4.2.2).

All rows run through all layers. A layer's q_proj, k_proj and v_proj get the others alone, and stored queries, unrotated,
are handed to the model's own rotation in the place of those left out; stored keys and values stand in the canvas and stay.
Hooks do that for the length of one pass; the model stays as it is. Knows nothing of stores or methods.
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
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.rotary import Rotation, RotationWatch
from kvweave.models.support import Geometry, attention_modules
from kvweave.types import ChunkKV

Projections = tuple[tuple[nn.Module, ...], ...]
"""Of each layer, in order: q_proj, k_proj, v_proj."""


def separate_projections(
    model: PreTrainedModel, geometry: Geometry, rotation: Rotation
) -> Projections | None:
    """The modules that make a layer's queries, keys and values; None where some rows alone cannot be run through them.

    That is where a family has other modules (fused ones, mostly), where they make more than the heads (a gate), and where a
    layer turns a part of each head or nothing, since queries are replaced as its rotation gets them.
    """
    heads = int(getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0))
    widths = [count * geometry.head_width for count in (heads, geometry.kv_heads, geometry.kv_heads)]
    if any(how.width != geometry.head_width for how in rotation.layers):
        return None
    found = {}
    for attention in attention_modules(model).values():
        modules = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if [getattr(module, "out_features", None) for module in modules] != widths:
            return None
        found[int(attention.layer_idx)] = tuple(module for module in modules if module is not None)  # type: ignore[arg-type]
    return tuple(found[layer] for layer in sorted(found))


class StoredQueries(RotationWatch):
    """While active, `projected` (W,) of a pass' rows (T,), both prompt positions, ascending, are projected, no others.

    The others' queries are those of the placed `spans`; their keys and values are whatever the canvas holds. Raises
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
        self.projected = torch.searchsorted(rows, projected)  # (W,), places among the rows
        self._projections = projections
        self._rows = rows.numel()
        self._parts = _taken(spans, rows, torch.isin(rows, projected, invert=True))
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
        """Project (1, W, hidden) of (1, T, hidden); whatever has not all rows (the last layer's last row) as it is."""
        (hidden,) = args
        if not self._is_own(hidden, 1):
            return args
        self._layer, self._narrowed = layer, True
        return (hidden.index_select(1, self.projected),)

    def _widen(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """What was projected among zeros, (1, T, width), in whose place what is stored comes later."""
        if not self._narrowed or threading.get_ident() != self._thread:
            return output
        self._narrowed = False
        return output.new_zeros(1, self._rows, output.shape[-1]).index_copy_(1, self.projected, output)

    def _stand_in(
        self, q: Tensor, k: Tensor, cos: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._is_own(q, 2):
            q = q.clone()  # (1, H, T, D)
            for places, inside, kv in self._parts:
                q.index_copy_(2, places, kv.layer_queries(self._layer)[None, :, inside].to(q.device))
        return super()._stand_in(q, k, cos, *args, **kwargs)

    def _is_own(self, states: Tensor, dimension: int) -> bool:
        """Whether this belongs to the pass and has all its rows there."""
        return threading.get_ident() == self._thread and states.shape[dimension] == self._rows


def _taken(spans: Sequence[PlacedSpan], rows: Tensor, stored: Tensor) -> list[tuple[Tensor, Tensor, ChunkKV]]:
    """Of each span that holds queries the places (n,) among the rows that take them, and where they stand in the span.

    `stored` (T,) says which of the rows take any.
    """
    parts = []
    for span in spans:
        if span.kv.queries is None:
            continue
        places = (stored & (rows >= span.start) & (rows < span.start + span.kv.tokens)).nonzero()[:, 0]
        if places.numel():
            parts.append((places, (rows[places] - span.start).cpu(), span.kv))
    found, wanted = sum(places.numel() for places, _, _ in parts), int(stored.sum())
    if found != wanted:
        raise InvalidRequest(
            f"{wanted - found} of {rows.numel()} rows are neither projected nor stored with their queries; have them projected"
        )
    return parts
