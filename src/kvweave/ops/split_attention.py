"""Attention of chosen rows on CPUs: fused attention without a mask over most keys, with one over the few between the rows.

Ascending rows are cut into blocks. Keys that all rows of a block see need no mask; what is left are the keys between its
first and its last row, and with a sliding window those that the last row has left behind. Both shares go through PyTorch's
fused kernel, which gives out the logits' mass beside its result, so that they can be joined exactly. Heads that share keys are
rows of one call: the kernel is the faster the more rows it is given, as it takes more of them at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionInput, contiguous, unpacked
from kvweave.ops.row_blocks import BlockedAttention

LARGE, SMALL = 768, 192
"""Queries of a call, rows times heads that share keys, from which on the kernel takes 256 and 64 of them at a time."""
AT_ONCE = 256
"""Of those, what one thread takes on."""
MANY = 4
"""Blocks of at least so many large calls; with fewer, more keys lie between a block's rows than large calls are worth."""


def can_split() -> bool:
    """Whether this PyTorch has the kernel as an operation of its own, mass included."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows `start:end`: keys `first:clear` and `hidden:last` are masked, those in between all rows see.

    `mask` (heads that share keys · rows, masked keys) is additive; None for a single row, which sees all of them.
    """

    start: int
    end: int
    first: int
    clear: int
    hidden: int
    last: int
    mask: Tensor | None

    def masked(self, kept: Tensor) -> Tensor:
        """Of keys or values (1, G, S, D), those that the mask is about."""
        after = kept[:, :, self.hidden : self.last]
        if self.first == self.clear:
            return after
        return torch.cat([kept[:, :, self.first : self.clear], after], dim=2)


class SplitAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, on a CPU; see RowAttention.

    Blocks and masks are made once per sliding window. Soft-capped logits, which the kernel lacks, are BlockedAttention's.
    """

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._capped = BlockedAttention(rows, dtype)
        self._blocks: dict[int | None, list[list[_Block]]] = {}

    def attend(
        self,
        query: Tensor,
        given: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Request by request; see RowAttention."""
        if softcap is not None:
            return self._capped.attend(query, given, scaling=scaling, window=window, softcap=softcap)
        if window not in self._blocks:
            kv_heads = given[0].private.keys.shape[1]
            self._blocks[window] = [
                list(_cut(rows, window, query.shape[1] // kv_heads, kv_heads, self._dtype))
                for rows in self._rows
            ]
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
        shares = zip(
            unpacked(query, self._rows), unpacked(out, self._rows), given, self._blocks[window], strict=True
        )
        for own_query, own_out, own, blocks in shares:
            _attend(own_query[0], *contiguous(own), blocks, scaling, own_out[0])
        return out


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[_Block], scaling: float, out: Tensor
) -> None:
    """One request: query (H, T, D) over keys and values (1, G, S, D), written to `out` (H, T, D)."""
    query, out = (each.unflatten(0, (keys.shape[1], -1)) for each in (query, out))  # (G, H/G, T, D)
    for block in blocks:
        own = query[:, :, block.start : block.end]
        packed = own.flatten(1, 2)[None]  # (1, G, H/G · rows, D)
        made, mass = _fused(packed, block.masked(keys), block.masked(values), block.mask, scaling)
        if block.hidden > block.clear:
            seen = slice(block.clear, block.hidden)
            more, more_mass = _fused(packed, keys[:, :, seen], values[:, :, seen], None, scaling)
            made = torch.lerp(made.float(), more.float(), (more_mass - mass).sigmoid()[..., None])
        out[:, :, block.start : block.end] = made.view(own.shape)


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention (1, G, T, D), and the log of the sum of each row's exponentiated logits (1, G, T)."""
    made: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scaling
    )
    return made


def _cut(
    rows: Tensor, window: int | None, sharing: int, kv_heads: int, dtype: torch.dtype
) -> Iterator[_Block]:
    """Blocks of about equal size, for `sharing` query heads to each of `kv_heads`."""
    count = rows.numel()
    large = max(LARGE, AT_ONCE * -(-torch.get_num_threads() // kv_heads))  # work for all threads
    queries = large if count * sharing >= MANY * large else SMALL
    blocks = max(1, count * sharing // queries) if count else 0
    edges = torch.linspace(0, count, blocks + 1).round().int().tolist()
    for start, end in pairwise(edges):
        yield _block(rows[start:end], start, window, sharing, dtype)


def _block(own: Tensor, start: int, window: int | None, sharing: int, dtype: torch.dtype) -> _Block:
    """The block of the rows at positions `own` (rows,), of which the first is the pass's row `start`."""
    lowest, highest = int(own[0]), int(own[-1])
    first = clear = 0
    if window is not None:
        first, clear = max(0, lowest - window + 1), max(0, highest - window + 1)
    if lowest == highest:
        return _Block(start, start + 1, clear, clear, clear, highest + 1, None)
    clear = min(clear, lowest)
    hidden = lowest  # its own key is among the masked ones, so that every row sees one of them
    positions = torch.cat([torch.arange(first, clear), torch.arange(hidden, highest + 1)])
    seen = positions <= own[:, None]
    if window is not None:
        seen &= positions > own[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return _Block(start, start + own.numel(), first, clear, hidden, highest + 1, mask.repeat(sharing, 1))
