"""Chosen rows through the library's fused attention and one mask over the whole prompt: what there is without an operator.

A recipe with this in its attend slot computes the same as with its own, in the time that a mask takes.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.ops.row_blocks import hiding_mask
from kvweave.recipes.attend import Causal
from kvweave.recipes.request import Matched, PrefillRequest


@dataclass(frozen=True, slots=True)
class Masked(Causal):
    """Causal attention by masks."""

    def plan(self, request: PrefillRequest, matched: tuple[Matched, ...], rows: Tensor) -> RowPlan:
        """One mask for all layers that share a window."""
        geometry = request.adapter.geometry
        return MaskedRows(rows.to(geometry.device), geometry.dtype)


class MaskedRows(RowPlan):
    """Rows (T,), ascending, each hidden from later keys by its line of an additive mask (T, N), made once per window.

    Soft-capped logits, which the fused kernels refuse, are left to the plan's own attention.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Every row against every key of the prompt."""
        if call.softcap is not None:
            return super().attend(call)
        self.show(call)
        return F.scaled_dot_product_attention(
            call.query,
            call.keys,
            call.values,
            attn_mask=self._mask(call),
            scale=call.scaling,
            enable_gqa=call.query.shape[1] != call.keys.shape[1],
        )

    def narrowed(self, rows: Tensor) -> Self:
        """The same plan, watches included, for some of its rows."""
        smaller = super().narrowed(rows)
        smaller._masks = {}
        return smaller

    def _mask(self, call: AttentionCall) -> Tensor:
        if call.window not in self._masks:
            positions = torch.arange(call.keys.shape[2], device=self.rows.device)
            self._masks[call.window] = hiding_mask(self.rows, positions, call.window, call.query.dtype)
        return self._masks[call.window]
