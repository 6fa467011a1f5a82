"""Attention of chosen rows over contiguous keys, fast on CPUs: sorted rows cut into blocks.

Each block of rows attends to the key range that its rows can see at most, through the library's fused
attention and a mask made once per request and shared by all layers. Rows 0..N−1 (a full prefill) need no
mask at all. Exact for any set of rows, sliding windows, grouped heads and soft-capped logits.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

MAX_BLOCKS = 4  # more blocks waste fewer masked keys but add calls; measured flat from 4 on at 4K tokens
MAX_BLOCK_ROWS = 512  # bounds a block's mask and, with soft caps, its logits


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Query rows `start:end` see keys `key_start:key_end`, less what the additive `mask` (rows, keys) hides."""

    start: int
    end: int
    key_start: int
    key_end: int
    mask: Tensor | None
    causal: bool = False


def cut_rows(rows: Tensor, *, window: int | None, dtype: torch.dtype) -> tuple[RowBlock, ...]:
    """Cut ascending prompt positions `rows` (T,) into blocks.

    A mask's dtype is the query's. Returns blocks in row order; empty for no rows.
    """
    count = rows.numel()
    if count == 0:
        return ()
    unlimited = window is None or int(rows[-1]) < window
    if unlimited and int(rows[0]) == 0 and int(rows[-1]) == count - 1:
        return (RowBlock(0, count, 0, count, None, causal=True),)
    blocks = max(MAX_BLOCKS, -(-count // MAX_BLOCK_ROWS)) if count >= 2 * MAX_BLOCKS else 1
    edges = torch.linspace(0, count, blocks + 1).round().int().tolist()
    return tuple(_block(rows, a, b, window, dtype) for a, b in pairwise(edges) if b > a)


def _block(rows: Tensor, start: int, end: int, window: int | None, dtype: torch.dtype) -> RowBlock:
    own = rows[start:end]
    key_end = int(own[-1]) + 1
    key_start = 0 if window is None else max(0, int(own[0]) - window + 1)
    if end - start == 1 and (window is None or key_end - key_start <= window):
        return RowBlock(start, end, key_start, key_end, None)
    positions = torch.arange(key_start, key_end, device=rows.device)
    hidden = positions[None, :] > own[:, None]  # (rows, keys)
    if window is not None:
        hidden |= positions[None, :] <= own[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, float("-inf"))
    return RowBlock(start, end, key_start, key_end, mask)


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: tuple[RowBlock, ...],
    *,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend block by block.

    Query (B, H, T, D); keys and values (B, G, ≥ N, D) contiguous in prompt order, all rows up to each
    query's position written. Returns (B, H, T, D).
    """
    parts = []
    for block in blocks:
        q = query[:, :, block.start : block.end]  # (B, H, rows, D)
        k = keys[:, :, block.key_start : block.key_end]  # (B, G, keys, D)
        v = values[:, :, block.key_start : block.key_end]
        if softcap is not None:
            parts.append(attend_softcap(q, k, v, block.mask, block.causal, scaling, softcap))
            continue
        parts.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=block.mask,
                is_causal=block.causal,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, dim=2) if len(parts) != 1 else parts[0]


def attend_softcap(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Attention with soft-capped logits (Gemma 2), which the fused kernels lack.

    Shapes as in `attend_blocks`; `mask` is additive or boolean (True sees), broadcastable to (B, H, T, S);
    `causal` hides later keys, rows and keys aligned at their end.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    logits = (query @ keys.transpose(2, 3)).float() * scaling  # (B, H, T, S)
    logits = torch.tanh(logits / softcap) * softcap
    if causal:
        rows, count = logits.shape[-2:]
        later = torch.ones(rows, count, dtype=torch.bool, device=logits.device).triu(count - rows + 1)
        logits = logits.masked_fill(later, float("-inf"))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1).to(query.dtype) @ values
