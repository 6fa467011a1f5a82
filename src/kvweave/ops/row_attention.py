"""Which implementation of attention over chosen rows runs where. All of them do what `attend_reference` defines.

Knows the implementations, and nothing of who asks.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvweave.ops.attention import RowAttention
from kvweave.ops.dense_attention import DenseAttention
from kvweave.ops.row_blocks import BlockedAttention


def row_attention(rows: Sequence[Tensor], dtype: torch.dtype) -> RowAttention:
    """For the rows of one pass, (T,) of each request, ascending; `dtype` is the query's.

    On GPUs a kernel of our own, where there is Triton; for bfloat16 on CPUs without matrix units, and rows with gaps,
    matrix products; else blocks, which run on any device, through PyTorch's fused attention.
    """
    device = rows[0].device.type
    if device == "cuda" and has_triton():
        from kvweave.ops.paged_attention import PagedAttention  # needs Triton to be imported at all

        return PagedAttention(rows)
    if device == "cpu" and dtype == torch.bfloat16 and not has_matrix_units() and not _whole(rows):
        return DenseAttention(rows)
    return BlockedAttention(rows, dtype)


def _whole(rows: Sequence[Tensor]) -> bool:
    """Whether all rows of every request are computed from the first on: plain causal attention, fused everywhere."""
    return all(own.numel() > 0 and int(own[-1]) == own.numel() - 1 for own in rows)


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_matrix_units() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 in hardware (AMX), which PyTorch's fused attention makes use of."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_tile", False))
