"""Attention of chosen query rows over a prompt that is partly stored and partly computed: the definition.

The input is described the way storage sees it: spans that are shared and read-only, the rows that belong
to this request alone, and which shared rows are stale and must be skipped because a private row replaces
them. `attend_reference` follows that description literally; `RowAttention` is what a version does for the requests
of one pass, and every version is tested against the reference. `merge` lays the description out in prompt order for
kernels that want contiguous keys.

Tensor letters: B batch, H query heads, G KV heads, T query rows, S stored tokens, D head width.
Nothing here knows models, files or methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

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
    request; `skip` lists prompt positions of shared rows that are stale and must not be seen, each of them
    replaced by a private row. Rows that are queried are among the private ones: every row sees itself.
    """

    shared: tuple[KeyRows, ...]
    private: KeyRows
    skip: Tensor


class RowAttention(Protocol):
    """Attention of several requests' rows, packed one behind the other: made for one pass, used at every layer of it.

    What is queried is told by prompt positions, not by a mask, so that requests may have any number of rows, each
    its own, over spans that they share. Made from `rows`, one ascending (T,) for each request.
    """

    def attend(
        self,
        query: Tensor,
        given: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """What `attend_reference` defines, for each request's rows over its own input; changes nothing it is given.

        Query (1, H, ΣT, D) holds the rows of all requests in order; `given` has one input for each. From layer to
        layer keys and values may change, not where they stand. Returns (1, H, ΣT, D) in the query's dtype.
        """
        ...


class ReferenceAttention:
    """`attend_reference`, request by request: slow, for comparison."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows

    def attend(
        self,
        query: Tensor,
        given: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See RowAttention."""
        parts = zip(unpacked(query, self._rows), self._rows, given, strict=True)
        return torch.cat(
            [
                attend_reference(q, rows, own, scaling=scaling, window=window, softcap=softcap)
                for q, rows, own in parts
            ],
            dim=2,
        )


def unpacked(query: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """Each request's share (1, H, T, D) of a packed query, as views."""
    ends = accumulate(own.numel() for own in rows)
    return [query[:, :, end - own.numel() : end] for own, end in zip(rows, ends, strict=True)]


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
    return merge(given, length)


def rows_whole(tensor: Tensor) -> Tensor:
    """A tensor (…, D) whose rows are contiguous, as kernels want them: itself, but for layouts that neither store nor canvas makes."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def merge(given: AttentionInput, length: int) -> tuple[Tensor, Tensor]:
    """Lay keys and values out contiguously in prompt order.

    Returns fresh (B, G, length, D) tensors owned by the caller: private rows stand in place of the shared rows they
    replace. Positions that nothing covers are zero.
    """
    private = given.private
    batch, heads, _, width = private.keys.shape
    keys = private.keys.new_empty(batch, heads, length, width)
    values = private.values.new_empty(batch, heads, length, private.values.shape[-1])
    filled = [span for span in given.shared if span.positions.numel()]
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
