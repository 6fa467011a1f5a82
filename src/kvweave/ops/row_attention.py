"""`row_attention` chooses the implementation that attends for the rows of a pass; see `RowAttention` for what it computes."""

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvweave.ops.attention import RowAttention
from kvweave.ops.blocked_attention import BlockedAttention, SplitAttention, can_split
from kvweave.ops.span_attention import SpanAttention


def row_attention(rows: Sequence[Tensor], dtype: torch.dtype, *, shared_spans: bool = False) -> RowAttention:
    """Return the fastest implementation for the rows of one pass, (T,) of each request, ascending.

    `dtype` is the query's; `shared_spans` says whether the requests' inputs have some. GPUs with Triton run a kernel of our own; all else is PyTorch's fused attention. If every
    request computes all rows, it runs as it is; otherwise on CPUs split into keys with and without a mask, elsewhere in
    blocks.
    """
    device = rows[0].device.type
    if device == "cuda" and has_triton():
        from kvweave.ops.paged_attention import PagedAttention

        return PagedAttention(rows)
    if device == "cpu" and shared_spans and can_split():
        return SpanAttention(rows, dtype)
    if device == "cpu" and can_split() and not all(map(_is_whole, rows)):
        return SplitAttention(rows, dtype)
    return BlockedAttention(rows, dtype)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _is_whole(rows: Tensor) -> bool:
    """Whether a request's rows are all up to the last one: plain causal attention."""
    return rows.numel() > 0 and int(rows[-1]) == rows.numel() - 1
