"""Attention of a few rows of many requests over the spans that they share, on CPUs, without copying a span.

Requests over the same chunks attend to the same tensors (FusionRAG §4.3, Q-Sparse-Attn: shared and exclusive pages). A
span is read once for all of them: their rows are rows of one call of PyTorch's fused kernel, which also returns the mass of the
logits, so that the spans' results can be joined exactly (as in Hydragen, arXiv 2402.05099). A mask hides from each row what it
may not see: later keys, keys out of its window, and stale keys that its request replaces.

Requests with many rows read merged spans instead (`SplitAttention`): a copy costs them little, and masks would cost more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kvweave.ops.attention import AttentionInput, KVRows, split_packed, with_contiguous_rows
from kvweave.ops.row_attention import SplitAttention, fused_attention
from kvweave.ops.row_blocks import additive_mask

FEW_ROWS: Final = 64
"""Requests with more rows read merged spans."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """The packed rows (R,) that see a span, and their additive mask, once for each head that shares keys, (H/G · R, S).

    None if they see all of it.
    """

    rows: Tensor
    mask: Tensor | None


class SpanAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, on a CPU; see RowAttention.

    The positions of all keys are read from the first layer's input. No gradients.
    """

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._starts = [0, *accumulate(own.numel() for own in rows)]
        self._few = [request for request, own in enumerate(rows) if own.numel() <= FEW_ROWS]
        self._many = [request for request, own in enumerate(rows) if own.numel() > FEW_ROWS]
        self._merged = SplitAttention([rows[request] for request in self._many], dtype)
        self._whole = SplitAttention(rows, dtype)  # makes no blocks before it is used
        self._few_rows = torch.cat(
            [torch.empty(0, dtype=torch.long)]
            + [torch.arange(self._starts[n], self._starts[n + 1]) for n in self._few]
        )
        self._readings: dict[tuple[int | None, int], list[_Reading]] = {}

    def attend(
        self,
        query: Tensor,
        sources: Sequence[AttentionInput],
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend span by span; see RowAttention."""
        if softcap is not None:  # the kernel has none
            return self._whole.attend(query, sources, scaling=scaling, window=window, softcap=softcap)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._few:
            self._attend_to_spans(query, sources, scaling, window, out)
        if self._many:
            parts = split_packed(query, self._rows)
            packed = torch.cat([parts[request] for request in self._many], dim=2)
            own = [sources[request] for request in self._many]
            done = self._merged.attend(packed, own, scaling=scaling, window=window)
            ends = accumulate(self._rows[request].numel() for request in self._many)
            for request, end in zip(self._many, ends, strict=True):
                start, count = self._starts[request], self._rows[request].numel()
                out[:, :, start : start + count] = done[:, :, end - count : end]
        return out

    def _attend_to_spans(
        self,
        query: Tensor,
        sources: Sequence[AttentionInput],
        scaling: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Write the attention of all requests with few rows to `out` (1, H, ΣT, D)."""
        spans = _distinct_spans(sources, self._few)
        kv_heads = spans[0][0].keys.shape[1]
        grouped = query[0].unflatten(0, (kv_heads, -1))  # (G, H/G, ΣT, D)
        shape = window, grouped.shape[1]
        if shape not in self._readings:
            self._readings[shape] = [self._reading(*span, sources, *shape) for span in spans]
        result = torch.zeros(grouped.shape, dtype=torch.float32)
        mass = torch.full(grouped.shape[:-1], float("-inf"))
        for (span, _), reading in zip(spans, self._readings[shape], strict=True):
            if not reading.rows.numel():
                continue
            own = grouped[:, :, reading.rows]  # (G, H/G, R, D)
            packed = own.flatten(1, 2)[None]
            keys, values = with_contiguous_rows(span.keys), with_contiguous_rows(span.values)
            more, more_mass = fused_attention(packed, keys, values, reading.mask, scaling)
            more = more.view(own.shape).float()
            more_mass = more_mass.view(own.shape[:-1]).float()
            held = mass[:, :, reading.rows]
            share = (more_mass - held).sigmoid()[..., None]  # 1 where nothing has been seen before
            result[:, :, reading.rows] = torch.lerp(result[:, :, reading.rows], more, share)
            mass[:, :, reading.rows] = torch.logaddexp(held, more_mass)
        out[0, :, self._few_rows] = result.flatten(0, 1)[:, self._few_rows].to(out.dtype)

    def _reading(
        self,
        span: KVRows,
        readers: Sequence[int],
        sources: Sequence[AttentionInput],
        window: int | None,
        sharing: int,
    ) -> _Reading:
        """Return which packed rows of the `readers` see the span, and their mask for `sharing` heads."""
        rows, masks = [], []
        for request in readers:
            own = self._rows[request]
            mask = additive_mask(own, span.positions, window, self._dtype)  # (T, S)
            if sources[request].private is not span:
                mask[:, torch.isin(span.positions, sources[request].skip)] = float("-inf")
            seeing = (mask == 0).any(dim=1)
            rows.append(torch.arange(self._starts[request], self._starts[request + 1])[seeing])
            masks.append(mask[seeing])
        mask = torch.cat(masks)
        return _Reading(torch.cat(rows), mask.repeat(sharing, 1) if bool((mask != 0).any()) else None)


def _distinct_spans(
    sources: Sequence[AttentionInput], requests: Sequence[int]
) -> list[tuple[KVRows, list[int]]]:
    """Return each span once, by where its keys are in memory and in the prompt, with the requests that attend to it."""
    found: dict[tuple[int, int, int], tuple[KVRows, list[int]]] = {}
    for request in requests:
        own = sources[request]
        for span in (*own.shared, own.private):
            if span.positions.numel():
                key = span.keys.data_ptr(), span.positions.numel(), int(span.positions[0])
                found.setdefault(key, (span, []))[1].append(request)
    return list(found.values())
