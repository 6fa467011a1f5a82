"""Attention of chosen rows through PyTorch's fused attention, on any device: sorted rows, cut into blocks.

Each block of rows attends to the widest key range that one of its rows can see, through the library's fused
attention and a mask shared by all layers. Rows 0..N−1 (a full prefill) need no mask at all. Exact for any
set of rows, sliding windows, grouped heads and soft-capped logits.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.ops.attention import AttentionInput, apply_softcap, in_prompt_order, split_packed

MIN_BLOCKS = 4  # of a large pass: fewer waste masked keys, more add calls
SIDE_BY_SIDE = 16  # rows spread over at most this part of their keys waste few masked keys in one block
MAX_BLOCK_ROWS = 512  # bounds a block's mask and, with soft caps, its logits
MAX_KEPT_MASKS = 2**26  # elements; beyond this, every layer makes its masks again

BlockT = TypeVar("BlockT", bound=Hashable)


class BlockedAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, in `dtype`; see RowAttention.

    Blocks are made once per sliding window.
    """

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._blocks: dict[int | None, list[RowBlocks]] = {}

    def attend(
        self,
        query: Tensor,
        sources: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend request by request; see RowAttention."""
        if window not in self._blocks:
            self._blocks[window] = [RowBlocks(rows, window=window, dtype=self._dtype) for rows in self._rows]
        requests = zip(split_packed(query, self._rows), sources, self._blocks[window], strict=True)
        parts = [attend_rows(q, own, blocks, scaling=scaling, softcap=softcap) for q, own, blocks in requests]
        return torch.cat(parts, dim=2) if len(parts) != 1 else parts[0]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Query rows `start:end` see keys `key_start:key_end`; `masked` if some of those rows may not see all of them."""

    start: int
    end: int
    key_start: int
    key_end: int
    masked: bool
    causal: bool = False


class RowBlocks:
    """Ascending prompt positions `rows` (T,) cut into blocks, for layers with one sliding window.

    Masks are additive, in the query's `dtype`.
    """

    def __init__(self, rows: Tensor, *, window: int | None, dtype: torch.dtype) -> None:
        self.blocks = _cut(rows, window)
        self._rows = rows
        self._window = window
        self._dtype = dtype
        elements = sum((b.end - b.start) * (b.key_end - b.key_start) for b in self.blocks if b.masked)
        self._masks = MaskCache[RowBlock](elements)

    def mask(self, block: RowBlock) -> Tensor | None:
        """Return the mask of a block's rows, (rows, keys); None if they see all keys of the block."""
        return self._masks.get(block, self._make_mask) if block.masked else None

    def _make_mask(self, block: RowBlock) -> Tensor:
        own = self._rows[block.start : block.end]
        positions = torch.arange(block.key_start, block.key_end, device=own.device)
        return additive_mask(own, positions, self._window, self._dtype)


class MaskCache(Generic[BlockT]):
    """Keeps the masks of blocks for the next layer, unless all of them together have too many `elements`."""

    def __init__(self, elements: int) -> None:
        self._masks: dict[BlockT, Tensor] | None = {} if elements <= MAX_KEPT_MASKS else None

    def get(self, block: BlockT, make: Callable[[BlockT], Tensor]) -> Tensor:
        """Return the block's mask, made by `make` if it is not kept."""
        if self._masks is None:
            return make(block)
        if block not in self._masks:
            self._masks[block] = make(block)
        return self._masks[block]


def additive_mask(rows: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return −inf where a key at `positions` (S,) is after a row (T,) or before its window, else 0, (T, S)."""
    hidden = positions[None, :] > rows[:, None]
    if window is not None:
        hidden |= positions[None, :] <= rows[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, float("-inf"))


def attend_rows(
    query: Tensor, source: AttentionInput, rows: RowBlocks, *, scaling: float, softcap: float | None = None
) -> Tensor:
    """Attend block by block: what `attend_reference` defines, for query (B, H, T, D) at the positions of `rows`.

    `source` must cover every position up to a row's own, and private rows must replace the skipped ones.
    Keys are read in prompt order: shared spans are merged first. Pass merged ones if several passes or layers use
    them. Returns (B, H, T, D).
    """
    keys, values = in_prompt_order(source)
    parts = [query[:, :, :0]]
    for block in rows.blocks:
        q = query[:, :, block.start : block.end]  # (B, H, rows, D)
        k = keys[:, :, block.key_start : block.key_end]  # (B, G, keys, D)
        v = values[:, :, block.key_start : block.key_end]
        mask = rows.mask(block)
        if softcap is not None:
            parts.append(attend_softcap(q, k, v, mask, block.causal, scaling, softcap))
            continue
        parts.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=block.causal,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, dim=2) if len(parts) > 2 else parts[-1]


def attend_softcap(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Attend with soft-capped logits (Gemma 2), which the fused kernels lack.

    Shapes as in `attend_rows`. `mask` is additive or boolean (True sees), broadcastable to (B, H, T, S);
    `causal` masks later keys, with rows and keys aligned at their end.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    logits = (query @ keys.transpose(2, 3)).float() * scaling  # (B, H, T, S)
    logits = apply_softcap(logits, softcap)
    if causal:
        rows, count = logits.shape[-2:]
        later = torch.ones(rows, count, dtype=torch.bool, device=logits.device).triu(count - rows + 1)
        logits = logits.masked_fill(later, float("-inf"))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1).to(query.dtype) @ values


def _cut(rows: Tensor, window: int | None) -> tuple[RowBlock, ...]:
    count = rows.numel()
    if count == 0:
        return ()
    unlimited = window is None or int(rows[-1]) < window
    if unlimited and int(rows[0]) == 0 and int(rows[-1]) == count - 1:
        return (RowBlock(0, count, 0, count, masked=False, causal=True),)
    last, spread = int(rows[-1]), int(rows[-1]) - int(rows[0])
    seen = last + 1 if window is None else min(last + 1, window)
    least = 1 if count < 2 * MIN_BLOCKS or spread * SIDE_BY_SIDE <= seen else MIN_BLOCKS
    blocks = max(least, -(-count // MAX_BLOCK_ROWS))
    edges = torch.linspace(0, count, blocks + 1).round().int().tolist()
    return tuple(_block(rows, a, b, window) for a, b in pairwise(edges) if b > a)


def _block(rows: Tensor, start: int, end: int, window: int | None) -> RowBlock:
    key_end = int(rows[end - 1]) + 1
    key_start = 0 if window is None else max(0, int(rows[start]) - window + 1)
    one_row_sees_all = end - start == 1 and (window is None or key_end - key_start <= window)
    return RowBlock(start, end, key_start, key_end, masked=not one_row_sees_all)
