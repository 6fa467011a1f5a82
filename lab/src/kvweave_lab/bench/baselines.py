"""What requests are compared with: full prefill by transformers alone, and row attention through a mask.

kvweave's attention function passes calls without rows on to transformers; `stock_attention` removes even that step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvweave.models.adapter import Adapter
from kvweave.models.attention import ATTENTION_NAME, AttentionCall, RowPlan
from kvweave.ops.row_blocks import additive_mask
from kvweave.recipes.attend import Causal
from kvweave.recipes.request import Matched, PrefillRequest

BLOCK_TOKENS = 1024
"""Tokens of a block in `blockwise_prefill`."""


def transformers_prefill(adapter: Adapter, ids: Tensor) -> Tensor:
    """Prefill a prompt (1, N) in one causal pass; return the logits (1, vocab) of the last position."""
    return blockwise_prefill(adapter, ids, ids.shape[1])


def blockwise_prefill(adapter: Adapter, ids: Tensor, block_tokens: int = BLOCK_TOKENS) -> Tensor:
    """Prefill a prompt (1, N) block by block; return the logits (1, vocab) of the last position."""
    cache = DynamicCache(config=adapter.model.config)
    logits = torch.empty(0)
    with torch.no_grad():
        for block in ids.split(block_tokens, dim=1):
            logits = adapter.model(block, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


@contextmanager
def stock_attention(adapter: Adapter) -> Iterator[None]:
    """Let the model call transformers' sdpa directly. Models with a soft cap, which sdpa refuses, keep kvweave's."""
    model: PreTrainedModel = adapter.model
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@dataclass(frozen=True, slots=True)
class MaskAttend(Causal):
    """The attend slot with an additive mask for transformers' fused attention, instead of kvweave's row attention.

    The result is the same; the time is what a mask costs without a special operator.
    """

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """Return a plan with one mask for all layers that share a window."""
        geometry = request.adapter.geometry
        return MaskRowPlan(rows.to(geometry.device), geometry.dtype)


class MaskRowPlan(RowPlan):
    """Rows (T,), ascending, with an additive mask (T, N) that hides later keys, made once per window.

    Soft-capped logits, which the fused kernels refuse, go through the base class's attention.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend from every row to every key of the prompt."""
        if call.softcap is not None:
            return super().attend(call)
        self.notify_hooks(call)
        return F.scaled_dot_product_attention(
            call.query,
            call.keys,
            call.values,
            attn_mask=self._mask(call),
            scale=call.scaling,
            enable_gqa=call.query.shape[1] != call.keys.shape[1],
        )

    def subset(self, rows: Tensor) -> Self:
        """Return the same plan, hooks included, for some of its rows."""
        smaller = super().subset(rows)
        smaller._masks = {}
        return smaller

    def _mask(self, call: AttentionCall) -> Tensor:
        if call.window not in self._masks:
            positions = torch.arange(call.keys.shape[2], device=self.rows.device)
            self._masks[call.window] = additive_mask(self.rows, positions, call.window, call.query.dtype)
        return self._masks[call.window]
