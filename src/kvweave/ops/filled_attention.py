"""Attention of almost all rows of a prompt: the few that are missing are put in, so that plain causal attention does it.

The fused kernels skip what causal rows do not see and need no mask; with a gap anywhere they need one for all. What is
computed for rows that nobody asked for is thrown away.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionInput, unpacked
from kvweave.ops.row_blocks import BlockedAttention


class FilledAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, in `dtype`; see RowAttention."""

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows = rows
        self._filled = [torch.arange(int(own[-1]) + 1, device=own.device) for own in rows]
        self._whole = BlockedAttention(self._filled, dtype)

    def attend(
        self,
        query: Tensor,
        given: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """All rows of every request up to its last one; see RowAttention."""
        _, heads, _, width = query.shape
        whole = query.new_zeros(1, heads, sum(each.numel() for each in self._filled), width)
        for part, own, rows in zip(
            unpacked(whole, self._filled), unpacked(query, self._rows), self._rows, strict=True
        ):
            part.index_copy_(2, rows, own)
        out = self._whole.attend(whole, given, scaling=scaling, window=window, softcap=softcap)
        parts = zip(unpacked(out, self._filled), self._rows, strict=True)
        return torch.cat([part[:, :, rows] for part, rows in parts], dim=2)
