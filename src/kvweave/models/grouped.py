"""Rows that attend to the context in a group of its own (APE)."""

from dataclasses import replace

import torch
from torch import Tensor

from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.ops.grouped_attention import ContextGroup, attend_grouped


class GroupedPlan(RowPlan):
    """Rows (T,) behind the context attend to it in a group of its own, rows before its end as the model would.

    `columns` (first, end) are the context's prompt positions. Its logits are divided by `temperature`, the log of
    what they sum to is multiplied by `scale` · `temperature`, and the result is merged with attention to
    everything else. Sliding windows count rows of the canvas, as the library's masks do. Raises InvalidRequest
    for a temperature or scale that is not above 0.
    """

    def __init__(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        *,
        columns: tuple[int, int],
        temperature: float = 0.9,
        scale: float = 0.9,
    ) -> None:
        super().__init__(rows, dtype)
        self._group = ContextGroup(*columns, temperature, scale)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (B, H, T, D) over the canvas' keys and values (B, G, N, D)."""
        self.show(call)
        inside = int((self.rows < self._group.end).sum())
        behind = attend_grouped(
            call.query[:, :, inside:],
            self.rows[inside:],
            call.keys,
            call.values,
            self._group,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
        )
        if inside == 0:
            return behind
        before = self._attend_plainly(replace(call, query=call.query[:, :, :inside]), self.rows[:inside])
        return torch.cat([before, behind], dim=2)
