"""Which implementation of attention over chosen rows runs where. All of them do what `attend_reference` defines.

Knows the implementations, and nothing of who asks.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvweave.ops.attention import RowAttention
from kvweave.ops.row_blocks import BlockedAttention
from kvweave.ops.split_attention import SplitAttention, can_split


def row_attention(rows: Sequence[Tensor], dtype: torch.dtype) -> RowAttention:
    """For the rows of one pass, (T,) of each request, ascending; `dtype` is the query's.

    On GPUs a kernel of our own, where there is Triton. Else PyTorch's fused attention: as it is where every request computes all
    rows, on CPUs split into keys with and without a mask, elsewhere in blocks.
    """
    device = rows[0].device.type
    if device == "cuda" and has_triton():
        from kvweave.ops.paged_attention import PagedAttention

        return PagedAttention(rows)
    if device == "cpu" and can_split() and not all(map(_whole, rows)):
        return SplitAttention(rows, dtype)
    return BlockedAttention(rows, dtype)


def _whole(rows: Tensor) -> bool:
    """Whether a request's rows are all up to the last one: plain causal attention."""
    return rows.numel() > 0 and int(rows[-1]) == rows.numel() - 1


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
