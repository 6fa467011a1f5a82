"""Which implementation of attention over chosen rows runs where. All of them do what `attend_reference` defines.

Knows the implementations, and nothing of who asks.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kvweave.ops.attention import RowAttention
from kvweave.ops.dense_attention import DenseAttention
from kvweave.ops.filled_attention import FilledAttention
from kvweave.ops.row_blocks import BlockedAttention

_ALMOST_ALL: Final = 0.9
"""Of the rows up to the last one: with fewer gaps, computing those too costs less than leaving them out."""


def row_attention(rows: Sequence[Tensor], dtype: torch.dtype) -> RowAttention:
    """For the rows of one pass, (T,) of each request, ascending; `dtype` is the query's.

    On GPUs a kernel of our own, where there is Triton. Else PyTorch's fused attention: as it is for all rows, filled up where
    almost all are computed, in blocks for others, but matrix products for bfloat16 on CPUs without matrix units.
    """
    device = rows[0].device.type
    if device == "cuda" and has_triton():
        from kvweave.ops.paged_attention import PagedAttention  # needs Triton to be imported at all

        return PagedAttention(rows)
    share = _least_share(rows)
    if _ALMOST_ALL <= share < 1:
        return FilledAttention(rows, dtype)
    if device == "cpu" and dtype == torch.bfloat16 and not has_matrix_units() and share < 1:
        return DenseAttention(rows)
    return BlockedAttention(rows, dtype)


def _least_share(rows: Sequence[Tensor]) -> float:
    """How much of the rows up to its last one a request has computed, the one with least; 1: plain causal attention."""
    return min(own.numel() / (int(own[-1]) + 1) if own.numel() else 0.0 for own in rows)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_matrix_units() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 in hardware (AMX), which PyTorch's fused attention makes use of."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_tile", False))
