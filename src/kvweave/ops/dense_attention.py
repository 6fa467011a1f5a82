"""Attention of chosen rows on CPUs as plain matrix products, for so few rows at a time that their logits stay in cache.

Each block of rows attends to the keys up to its last row; only between its first and its last row anything has to be
hidden, so that no mask over the prompt is made. Heads that share keys are rows of one product; of KV heads as many take
their turn at a time as there are threads, so that each product is one thread's own: threads that share a small one wait for
each other longer than they compute. Logits are made in float32 whatever the dtype, as fused attention makes them.

For bfloat16 on a CPU without matrix units this is faster than PyTorch's fused kernel, whose small products run below
the speed of larger ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionInput, contiguous, unpacked

BLOCK_LOGITS = 2**18
"""Logits of one block and KV head, 1 MiB: about what a core's own cache holds."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Query rows `start:end` over keys `key_start:key_end`.

    `later` (rows, …) hides the last keys from rows before them, `outside` (rows, …) the first ones from rows whose
    window has left them behind; None where there is nothing to hide.
    """

    start: int
    end: int
    key_start: int
    key_end: int
    later: Tensor | None
    outside: Tensor | None

    def hide(self, logits: Tensor) -> None:
        """Put −inf in place of hidden logits (…, rows, keys)."""
        if self.later is not None:
            logits[..., -self.later.shape[1] :].masked_fill_(self.later, float("-inf"))
        if self.outside is not None:
            logits[..., : self.outside.shape[1]].masked_fill_(self.outside, float("-inf"))


class DenseAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending; see RowAttention.

    Blocks are made once per sliding window.
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows
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
        if window not in self._blocks:
            sharing = query.shape[1] // given[0].private.keys.shape[1]
            self._blocks[window] = [list(_cut(rows, window, sharing)) for rows in self._rows]
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3]).transpose(1, 2)
        shares = zip(
            unpacked(query, self._rows), unpacked(out, self._rows), given, self._blocks[window], strict=True
        )
        for own_query, own_out, own, blocks in shares:
            _attend(own_query[0], *contiguous(own), blocks, scaling, softcap, own_out[0])
        return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Sequence[_Block],
    scaling: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    """One request: query (H, T, D) over keys and values (1, G, S, D), written to `out` (H, T, D)."""
    groups = keys.shape[1]
    at_once = torch.get_num_threads()
    turned = keys[0].float().transpose(1, 2)  # (G, D, S)
    query, out = (each.unflatten(0, (groups, -1)) for each in (query, out))  # (G, H/G, T, D)
    for block in blocks:
        rows, span = slice(block.start, block.end), slice(block.key_start, block.key_end)
        for first in range(0, groups, at_once):
            some = slice(first, first + at_once)
            own = query[some, :, rows].float() * scaling  # (some G, H/G, rows, D)
            logits = own.flatten(1, 2) @ turned[some, :, span]  # (some G, H/G · rows, keys)
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            block.hide(logits.view(*own.shape[:3], -1))
            weights = logits.softmax(dim=-1).to(values.dtype)
            out[some, :, rows] = (weights @ values[0, some, span]).view(own.shape)


def _cut(rows: Tensor, window: int | None, sharing: int) -> Iterator[_Block]:
    """Blocks of as many rows as keep the logits of `sharing` heads within BLOCK_LOGITS, one at least."""
    start, count = 0, rows.numel()
    while start < count:
        left = rows[start:]
        key_start = 0 if window is None else max(0, int(left[0]) - window + 1)
        logits = (
            sharing * torch.arange(1, count - start + 1) * (left + 1 - key_start)
        )  # of the first 1, 2, … rows
        size = max(1, int(torch.searchsorted(logits, BLOCK_LOGITS, right=True)))
        yield _block(left[:size], start, key_start, window)
        start += size


def _block(own: Tensor, start: int, key_start: int, window: int | None) -> _Block:
    """The block of the rows at positions `own` (rows,), of which the first is the pass's row `start`."""
    first, last = int(own[0]), int(own[-1])
    later = outside = None
    if last > first:
        later = torch.arange(first + 1, last + 1) > own[:, None]
    if window is not None and last - window >= key_start:
        outside = torch.arange(key_start, last - window + 1) <= own[:, None] - window
    return _Block(start, start + own.numel(), key_start, last + 1, later, outside)
