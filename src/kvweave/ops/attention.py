"""Attention of chosen query rows over a prompt that is partly stored and partly computed: the definition.

The input is described the way storage sees it: spans that are shared and read-only, the rows that belong
to this request alone, and which shared rows are stale and must be skipped because a private row replaces
them. `attend_reference` follows that description literally and is what every faster version is tested
against; `merge` lays the same description out in prompt order for kernels that want contiguous keys.

Tensor letters: B batch, H query heads, G KV heads, T query rows, S stored tokens, D head width.
Nothing here knows models, files or methods.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys and values (B, G, S, D), keys already rotated, and the prompt position of each row (S,), ascending."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What query rows may attend to.

    `shared` spans are read-only and may be used by several requests at once; `private` rows belong to this
    request; `skip` lists prompt positions of shared rows that are stale and must not be seen.
    """

    shared: tuple[KeyRows, ...]
    private: KeyRows
    skip: Tensor


def attend_reference(
    query: Tensor,
    rows: Tensor,
    given: AttentionInput,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention in float32, straight from the definition (FusionRAG §4.3, Q-Sparse-Attn).

    Query (B, H, T, D) at prompt positions `rows` (T,); row t sees every key at a position ≤ t that is not
    skipped and, with a sliding `window`, at a position > t − window. Returns (B, H, T, D) in the query's dtype.
    """
    stored = kept_rows(given)
    keys, values, positions = stored.keys, stored.values, stored.positions
    visible = positions[None, :] <= rows[:, None]  # (T, S)
    if window is not None:
        visible &= positions[None, :] > rows[:, None] - window
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (keys, values))  # (B, H, S, D)
    logits = query.float() @ keys.transpose(2, 3) * scaling  # (B, H, T, S)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    weights = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values).to(query.dtype)


def kept_rows(given: AttentionInput) -> KeyRows:
    """Every row that may be seen, shared ones first, those to skip left out; new tensors."""
    kept = [~torch.isin(span.positions, given.skip) for span in given.shared]
    spans = [
        *zip(given.shared, kept, strict=True),
        (given.private, torch.ones_like(given.private.positions) > 0),
    ]
    return KeyRows(
        keys=torch.cat([span.keys[:, :, keep] for span, keep in spans], dim=2),  # (B, G, S, D)
        values=torch.cat([span.values[:, :, keep] for span, keep in spans], dim=2),
        positions=torch.cat([span.positions[keep] for span, keep in spans]),
    )


def contiguous(given: AttentionInput) -> tuple[Tensor, Tensor]:
    """Keys and values (B, G, S, D) in prompt order, from position 0 on.

    Without shared spans these are the private rows as they stand, which then cover the prompt; else a new copy.
    """
    if not given.shared:
        return given.private.keys, given.private.values
    length = 1 + max(
        int(rows.positions.max()) for rows in (*given.shared, given.private) if rows.positions.numel()
    )
    return merge(given, length, length)


def merge(given: AttentionInput, length: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Lay keys and values out contiguously in prompt order.

    Returns fresh (B, G, capacity, D) tensors owned by the caller whose first `length` rows are valid:
    private rows stand in place of the shared rows they replace. Positions that no span covers are zero and
    must be written before any row attends to them.
    """
    private = given.private
    batch, heads, _, width = private.keys.shape
    keys = private.keys.new_zeros(batch, heads, capacity, width)
    values = private.values.new_zeros(batch, heads, capacity, private.values.shape[-1])
    for span in given.shared:
        if span.positions.numel():
            start = int(span.positions[0])
            end = start + span.positions.numel()  # a shared span is a contiguous run of the prompt
            keys[:, :, start:end] = span.keys
            values[:, :, start:end] = span.values
    keys.index_copy_(2, private.positions, private.keys)
    values.index_copy_(2, private.positions, private.values)
    return keys, values
