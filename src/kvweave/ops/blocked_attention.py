"""Attention of chosen rows by PyTorch's fused kernel, in blocks of rows. Both classes are a `RowAttention`.

`SplitAttention` is the one for CPUs: fused attention without a mask over most keys, with a mask over the few between the rows.
Ascending rows are cut into blocks. Keys that all rows of a block see need no mask. The rest are the keys between the
block's first and last row and, with a sliding window, those before the last row's window. Both shares run through PyTorch's
fused kernel, which also returns the mass of the logits, so that they can be joined exactly. Heads that share keys are
rows of one call: the kernel takes more rows at a time, and is faster, the more rows it gets. Measured on a CPU without matrix
units (`lab/experiments/row_attention.py`).

`BlockedAttention` is for all other devices: each block of rows attends to the widest key range that one of its rows can see, with a
mask shared by all layers. Rows 0..N−1 (a full prefill) need no mask. Both are exact for any set of rows, sliding windows, grouped
heads and soft-capped logits.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.ops.attention import (
    AttentionInput,
    AttentionSettings,
    apply_softcap,
    in_prompt_order,
    split_packed,
    with_contiguous_rows,
)

LARGE, LARGE_STEP = 768, 256
"""Queries of a large call (rows times heads that share keys): the least number, and the number that one thread takes at a time."""
SMALL, SMALL_STEP = 192, 64
"""The same for passes with fewer rows."""
MIN_LARGE_CALLS = 4
"""Passes with rows for fewer large calls make small ones: large blocks would put more keys between a block's rows than they save."""


def can_split() -> bool:
    """Whether this PyTorch has the kernel as an operation of its own, with mass."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


class SplitAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, on a CPU; see RowAttention.

    Blocks are made once per sliding window. BlockedAttention handles soft-capped logits, which the kernel lacks. No gradients.
    """

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._softcapped = BlockedAttention(rows, dtype)
        self._blocks: dict[tuple[int | None, int, int], list[_Blocks]] = {}

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        """Attend request by request; see RowAttention."""
        if settings.softcap is not None:
            return self._softcapped.attend(query, sources, settings)
        kv_heads = sources[0].private.keys.shape[1]
        shape = (settings.window, query.shape[1] // kv_heads, kv_heads)
        if shape not in self._blocks:
            self._blocks[shape] = [_Blocks(rows, *shape, self._dtype) for rows in self._rows]
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
        requests = zip(
            split_packed(query, self._rows),
            split_packed(out, self._rows),
            sources,
            self._blocks[shape],
            strict=True,
        )
        for own_query, own_out, own, blocks in requests:
            keys, values = map(with_contiguous_rows, in_prompt_order(own))
            _attend(own_query[0], keys, values, blocks, settings.scaling, own_out[0])
        return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows `start:end`: keys `first:clear` and `hidden:last` are masked, all rows see those in between."""

    start: int
    end: int
    first: int
    clear: int
    hidden: int
    last: int

    @property
    def masked_keys(self) -> int:
        return self.clear - self.first + self.last - self.hidden

    def masked(self, tensor: Tensor) -> Tensor:
        """Return the masked ones of keys or values (1, G, S, D)."""
        if self.clear == self.hidden:
            return tensor[:, :, self.first : self.last]
        after = tensor[:, :, self.hidden : self.last]
        if self.clear == self.first:
            return after
        return torch.cat([tensor[:, :, self.first : self.clear], after], dim=2)


class _Blocks:
    """A request's rows (T,), ascending, cut into blocks for layers with one window and `sharing` query heads per KV head.

    Masks are additive, in the query's `dtype`.
    """

    def __init__(
        self, rows: Tensor, window: int | None, sharing: int, kv_heads: int, dtype: torch.dtype
    ) -> None:
        self.blocks = tuple(_cut(rows, window, sharing, kv_heads))
        self._rows, self._window, self._sharing, self._dtype = rows, window, sharing, dtype
        elements = sum(sharing * (block.end - block.start) * block.masked_keys for block in self.blocks)
        self._masks = MaskCache[_Block](elements)

    def mask(self, block: _Block) -> Tensor | None:
        """Return (sharing · rows, masked keys); None for a single row, which sees all of them."""
        return self._masks.get(block, self._make_mask) if block.end - block.start > 1 else None

    def _make_mask(self, block: _Block) -> Tensor:
        own = self._rows[block.start : block.end]
        positions = torch.cat(
            [torch.arange(block.first, block.clear), torch.arange(block.hidden, block.last)]
        )
        return additive_mask(own, positions, self._window, self._dtype).repeat(self._sharing, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, cut: _Blocks, scaling: float, out: Tensor) -> None:
    """Attend for one request: query (H, T, D) over keys and values (1, G, S, D), written to `out` (H, T, D)."""
    query, out = (each.unflatten(0, (keys.shape[1], -1)) for each in (query, out))  # (G, H/G, T, D)
    for block in cut.blocks:
        own = query[:, :, block.start : block.end]
        packed = with_contiguous_rows(own.flatten(1, 2)[None])  # (1, G, H/G · rows, D)
        result, mass = fused_attention(
            packed, block.masked(keys), block.masked(values), cut.mask(block), scaling
        )
        if block.hidden > block.clear:
            seen = slice(block.clear, block.hidden)
            more, more_mass = fused_attention(packed, keys[:, :, seen], values[:, :, seen], None, scaling)
            result = torch.lerp(result.to(mass), more.to(mass), (more_mass - mass).sigmoid()[..., None])
        out[:, :, block.start : block.end] = result.view(own.shape)


def fused_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return attention (1, G, T, D), and the log of the sum of each row's exponentiated logits (1, G, T)."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scaling
    )
    return result


def _cut(rows: Tensor, window: int | None, sharing: int, kv_heads: int) -> Iterator[_Block]:
    """Cut rows into blocks of about equal size, whose calls are large enough for all threads."""
    count = rows.numel()
    if not count:
        return
    threads = -(-torch.get_num_threads() // kv_heads)
    small, large = max(SMALL, SMALL_STEP * threads), max(LARGE, LARGE_STEP * threads)
    span = int(rows[-1]) - int(rows[0]) + 1
    near = count if window is None else count * min(window, span) // span  # rows with the same keys in view
    queries = large if near * sharing >= MIN_LARGE_CALLS * large else small
    blocks = min(count, max(1, count * sharing // queries))
    edges = torch.linspace(0, count, blocks + 1).round().int().tolist()
    for start, end in pairwise(edges):
        yield _block(rows[start:end], start, window)


def _block(own: Tensor, start: int, window: int | None) -> _Block:
    """Return the block of the rows at positions `own` (rows,), the first of which is the pass's row `start`."""
    lowest, highest = int(own[0]), int(own[-1])
    first = 0 if window is None else max(0, lowest - window + 1)
    clear = 0 if window is None else max(0, highest - window + 1)
    if lowest == highest:
        return _Block(start, start + 1, clear, clear, clear, highest + 1)
    # The first row's own key is among the masked ones, so that every row sees one of them.
    return _Block(start, start + own.numel(), first, min(clear, lowest), lowest, highest + 1)


# Fused attention in blocks, on any device

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

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        """Attend request by request; see RowAttention."""
        window = settings.window
        if window not in self._blocks:
            self._blocks[window] = [RowBlocks(rows, window=window, dtype=self._dtype) for rows in self._rows]
        requests = zip(split_packed(query, self._rows), sources, self._blocks[window], strict=True)
        parts = [attend_rows(q, own, blocks, settings) for q, own, blocks in requests]
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
        self.blocks = _cut_evenly(rows, window)
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
    query: Tensor, source: AttentionInput, rows: RowBlocks, settings: AttentionSettings
) -> Tensor:
    """Attend block by block, query (B, H, T, D) at the positions of `rows`; these have the window.

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
        if settings.softcap is not None:
            parts.append(attend_softcap(q, k, v, mask, block.causal, settings))
            continue
        parts.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=block.causal,
                scale=settings.scaling,
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
    settings: AttentionSettings,
) -> Tensor:
    """Attend with soft-capped logits (Gemma 2), which the fused kernels lack.

    Shapes as in `attend_rows`. `mask` is additive or boolean (True sees), broadcastable to (B, H, T, S);
    `causal` masks later keys, with rows and keys aligned at their end.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    logits = (query @ keys.transpose(2, 3)).float() * settings.scaling  # (B, H, T, S)
    logits = apply_softcap(logits, settings.softcap)
    if causal:
        rows, count = logits.shape[-2:]
        later = torch.ones(rows, count, dtype=torch.bool, device=logits.device).triu(count - rows + 1)
        logits = logits.masked_fill(later, float("-inf"))
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(dim=-1).to(query.dtype) @ values


def _cut_evenly(rows: Tensor, window: int | None) -> tuple[RowBlock, ...]:
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
    return tuple(_row_block(rows, a, b, window) for a, b in pairwise(edges) if b > a)


def _row_block(rows: Tensor, start: int, end: int, window: int | None) -> RowBlock:
    key_end = int(rows[end - 1]) + 1
    key_start = 0 if window is None else max(0, int(rows[start]) - window + 1)
    one_row_sees_all = end - start == 1 and (window is None or key_end - key_start <= window)
    return RowBlock(start, end, key_start, key_end, masked=not one_row_sees_all)
