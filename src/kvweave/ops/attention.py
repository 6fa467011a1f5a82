"""Attention of chosen query rows over a prompt that is partly stored and partly computed.

`AttentionInput` describes the prompt as storage sees it: spans that are shared and read-only, the rows of this request
alone, and the shared rows that are stale because a private row replaces them. `RowAttention` says what attention over it
is; tests compare each implementation with that definition, written out in float32. `merge_spans` lays the description out
in prompt order for kernels that need contiguous keys.

Tensor letters: B batch, H query heads, G KV heads, T query rows, S stored tokens, D head width.
The logits of such attention are here too, written out, for ops that need weights or sums of them. Nothing here knows models,
files or recipes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVRows:
    """Keys and values (B, G, S, D), keys already rotated, and the prompt position of each row (S,).

    Positions are ascending in a shared span; private rows may have any order.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What the query rows of one request may attend to.

    Attributes:
        shared: read-only spans, each a contiguous run of the prompt; several requests may use them at once.
        private: the rows of this request, among them the queried ones, so that every row sees itself.
        skip: prompt positions of stale shared rows, which must not be seen; a private row replaces each of them.
    """

    shared: tuple[KVRows, ...]
    private: KVRows
    skip: Tensor

    @property
    def spans(self) -> tuple[KVRows, ...]:
        """The shared spans, then the private rows."""
        return (*self.shared, self.private)


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """How a layer attends: the factor of its logits, its sliding window in tokens, and the soft cap on its logits."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class RowAttention(Protocol):
    """Attention of the packed rows of several requests; made for one pass, used at every layer of it.

    Rows are given by prompt positions, not by a mask. So each request may have any number of rows, over spans that
    they share. Made from `rows`, one ascending (T,) for each request.
    """

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        """Softmax attention of each request's rows over its own input (FusionRAG §4.3, Q-Sparse-Attn); changes no argument.

        A row at position t sees every key at a position ≤ t that is not skipped and, with a sliding window, at a position
        > t − window. Query (1, H, ΣT, D) holds the rows of all requests in order; `sources` has one input for each. Keys
        and values may change from layer to layer, their positions may not. Returns (1, H, ΣT, D) in the query's dtype.
        """
        ...


def split_packed(query: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return each request's share (1, H, T, D) of a packed query, as views."""
    ends = accumulate(own.numel() for own in rows)
    return [query[:, :, end - own.numel() : end] for own, end in zip(rows, ends, strict=True)]


def in_prompt_order(source: AttentionInput) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, G, S, D) in prompt order, from position 0.

    Without shared spans these are the private rows themselves, which then cover the prompt; else a new copy.
    """
    if not source.shared:
        return source.private.keys, source.private.values
    length = 1 + max(int(rows.positions.max()) for rows in source.spans if rows.positions.numel())
    return merge_spans(source, length)


def merge_spans(source: AttentionInput, length: int) -> tuple[Tensor, Tensor]:
    """Copy keys and values into contiguous tensors in prompt order.

    Returns new (B, G, length, D) tensors owned by the caller: private rows replace the shared rows at their positions.
    Positions that nothing covers are zero.
    """
    private = source.private
    batch, heads, _, width = private.keys.shape
    keys = private.keys.new_empty(batch, heads, length, width)
    values = private.values.new_empty(batch, heads, length, private.values.shape[-1])
    filled = [span for span in source.shared if span.positions.numel()]
    covered = 0  # up to here, everything is written
    for span in sorted(filled, key=lambda span: int(span.positions[0])):
        start = int(span.positions[0])
        end = start + span.positions.numel()  # a shared span is a contiguous run of the prompt
        for merged, own in ((keys, span.keys), (values, span.values)):
            merged[:, :, covered:start] = 0
            merged[:, :, start:end] = own
        covered = max(covered, end)
    keys[:, :, covered:] = 0
    values[:, :, covered:] = 0
    keys.index_copy_(2, private.positions, private.keys)
    values.index_copy_(2, private.positions, private.values)
    return keys, values


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return a tensor (…, D) whose rows are contiguous, as kernels need: itself, or a copy.

    Neither a store nor a fused cache makes layouts that need the copy.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


MAX_LOGITS = 2**24  # elements held at a time: rows run in blocks of this size
CPU_LOGITS = (
    2**20
)  # on a CPU: a larger block needs fresh memory pages each time, which costs more than another block


def rows_per_block(batch: int, heads: int, keys: int, device: torch.device) -> int:
    """Return the number of query rows whose logits fit MAX_LOGITS, on a CPU CPU_LOGITS; at least one."""
    most = min(MAX_LOGITS, CPU_LOGITS) if device.type == "cpu" else MAX_LOGITS
    return max(1, most // max(1, batch * heads * keys))


def visible_keys(rows: Tensor, first: int, end: int, window: int | None) -> Tensor:
    """Return which of the keys at positions first … end − 1 each row (R,) sees, (R, end − first), bool.

    A row sees keys at or before its own position and, with a sliding `window`, fewer than `window` positions before it.
    """
    positions = torch.arange(first, end, device=rows.device)
    visible = positions[None, :] <= rows[:, None]
    if window is not None:
        visible &= positions[None, :] > rows[:, None] - window
    return visible


def masked_logits(query: Tensor, keys: Tensor, visible: Tensor, settings: AttentionSettings) -> Tensor:
    """Return the logits of query (B, H, R, D) on keys (B, G, S, D), −inf where `visible` (R, S) is false.

    Made in the query's dtype, as attention makes them. Returns (B, H, R, S), float32, owned by the caller.
    """
    batch, heads, rows, width = query.shape
    # Heads that share keys follow each other: fold them into the rows instead of repeating the keys.
    folded = query.reshape(batch, keys.shape[1], -1, width)  # (B, G, H/G · R, D)
    logits = (folded @ keys.transpose(2, 3)).float()
    logits = logits.reshape(batch, heads, rows, -1).mul_(settings.scaling)  # (B, H, R, S)
    if settings.softcap is not None:
        logits = logits.div_(settings.softcap).tanh_().mul_(settings.softcap)
    # A question sees all of its context. On a GPU the check would wait for the device.
    if visible.is_cpu and bool(visible.all()):
        return logits
    return logits.masked_fill_(~visible, float("-inf"))


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return soft-capped logits, or the logits themselves without a cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
