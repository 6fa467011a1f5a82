"""kvweave's attention function, registered with transformers under one name, and the plans it follows.

A pass over chosen rows carries a plan as a keyword of the model call. Attention then follows the plan and ignores
masks. Any other call, such as an ordinary `generate` on the fused cache, takes the library's own path.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvweave.errors import UnsupportedModel
from kvweave.models.hooks import AttentionHook, LayerQueries
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, RowAttention
from kvweave.ops.blocked_attention import attend_softcap
from kvweave.ops.grouped_attention import ContextGroup, attend_grouped
from kvweave.ops.row_attention import row_attention

ATTENTION_NAME = "kvweave"
ROWS_KEYWORD = "kvweave_rows"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's attention, as the model passes them; see `LayerQueries`."""

    layer: int
    query: Tensor
    keys: Tensor
    values: Tensor
    settings: AttentionSettings


class AttentionPlan(Protocol):
    """How the rows of one pass attend; the model call carries it to every layer."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output of one layer, (B, H, T, D)."""
        ...


class RowPlan:
    """Plain causal attention of the prompt positions that a pass computes, `rows` (T,), ascending.

    `hooks` see every layer of the pass; add them before it runs. `around` makes a context of the model and the plan in which the pass
    runs, whole and with no other rows.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        self.rows = rows
        self.hooks: list[AttentionHook] = []
        self.around: Callable[[PreTrainedModel, RowPlan], AbstractContextManager[None]] | None = None
        self.layers_seen: set[int] = set()
        self._dtype = dtype
        self._attention: RowAttention | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention of the rows' query (B, H, T, D) over the cache's keys and values (B, G, N, D)."""
        self.notify_hooks(call)
        return self._attend_causally(call, self.rows)

    def subset(self, rows: Tensor) -> Self:
        """Return the same plan, hooks included, for some of its rows."""
        smaller = copy(self)
        smaller.rows, smaller._attention = rows, None
        return smaller

    def notify_hooks(self, call: AttentionCall) -> None:
        """Show one layer to all hooks."""
        self.layers_seen.add(call.layer)
        for hook in self.hooks:
            hook.on_layer(
                LayerQueries(call.layer, self.rows, call.query, call.keys, call.values, call.settings)
            )

    def _attend_causally(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """Return plain causal attention of `rows`, which must be the same at every layer."""
        if self._attention is None:
            self._attention = row_attention([rows], self._dtype)
        # The cache holds shared spans and rows merged: one private run in prompt order, nothing to skip.
        merged = KVRows(call.keys, call.values, torch.arange(call.keys.shape[2], device=call.keys.device))
        inputs = AttentionInput(shared=(), private=merged, skip=rows[:0])
        return self._attention.attend(call.query, [inputs], call.settings)


class GroupedPlan(RowPlan):
    """Rows (T,) after the context attend to it as a group of its own; rows before its end attend causally (APE).

    Attention to the group is merged with attention to everything else. Sliding windows count rows of the cache, as the
    library's masks do.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype, group: ContextGroup) -> None:
        super().__init__(rows, dtype)
        self._group = group

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention of the rows' query (B, H, T, D) over the cache's keys and values (B, G, N, D)."""
        self.notify_hooks(call)
        inside = int((self.rows < self._group.end).sum())
        grouped = attend_grouped(
            call.query[:, :, inside:],
            self.rows[inside:],
            call.keys,
            call.values,
            self._group,
            call.settings,
        )
        if inside == 0:
            return grouped
        causal = self._attend_causally(replace(call, query=call.query[:, :, :inside]), self.rows[:inside])
        return torch.cat([causal, grouped], dim=2)


def register_attention() -> None:
    """Register the attention function with transformers; registering it again changes nothing.

    The mask function is the library's own: without one, a padded batch would attend to its padding.
    """
    AttentionInterface.register(ATTENTION_NAME, kvweave_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def kvweave_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query (B, H, T, D), key and value (B, G, S, D) → (B, T, H, D)."""
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} uses learned attention sinks, which kvweave cannot fuse yet"
        )
    plan: AttentionPlan | None = kwargs.get(ROWS_KEYWORD)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    settings = AttentionSettings(scale, sliding_window, softcap)
    if plan is not None:
        layer = int(getattr(module, "layer_idx", -1))
        out = plan.attend(AttentionCall(layer, query, key, value, settings))
    elif softcap is not None:
        # A missing mask means plain causal attention, as it does for the library's own function.
        causal = attention_mask is None and query.shape[2] > 1
        out = attend_softcap(query, key, value, attention_mask, causal, settings)
    else:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return out.transpose(1, 2).contiguous(), None


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the model's attention layers by their names within it, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    }
