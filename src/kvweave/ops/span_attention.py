"""Attention of a few rows of many requests over the spans that they share, on CPUs, without copying a span.

Requests over the same chunks attend to the same tensors (FusionRAG §4.3, Q-Sparse-Attn: shared and exclusive pages). A
span is read once for all of them: their rows are rows of one call of PyTorch's fused kernel, which also returns the mass of the
logits, so that the spans' results can be joined exactly (as in Hydragen, arXiv 2402.05099). A mask hides from each row what it
may not see: later keys, keys out of its window, and stale keys that its request replaces.

Requests with many rows read merged spans instead (`SplitAttention`): a copy costs them little, and masks would cost more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.ops.attention import (
    AttentionInput,
    AttentionSettings,
    KVRows,
    split_packed,
    with_contiguous_rows,
)
from kvweave.ops.blocked_attention import SplitAttention, additive_mask, fused_attention

FEW_ROWS: Final = 64
"""Requests with more rows read merged spans."""


@dataclass(slots=True)
class _Reading:
    """The packed rows that see a span: `rows` (R,), and the additive mask (R, S) of each; None for those that see all of it.

    The span is the one at `index` of a `request`'s input, shared ones before the private one.
    """

    request: int
    index: int
    rows: list[int] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)

    def mask(self, sharing: int) -> Tensor | None:
        """Return the rows' mask, each repeated for the `sharing` heads that share keys; None if all see all."""
        some = next((mask for mask in self.masks if mask is not None), None)
        if some is None:
            return None
        masks = [torch.zeros_like(some) if mask is None else mask for mask in self.masks]
        return torch.stack(masks).repeat_interleave(sharing, 0)


@dataclass(frozen=True, slots=True)
class _Readings:
    """What one pass' rows read at layers with one sliding window.

    `rows` (ΣR,) has the rows of all readings, one reading after another, and `places` (ΣT, most) where each packed row is among
    them, the last place as often as needed. Each of `spans` says which span of which request's input
    is read, by which of these rows times heads, and with what mask.
    """

    rows: Tensor
    places: Tensor
    spans: list[tuple[int, int, slice, Tensor | None]]


class SpanAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending, on a CPU; see RowAttention.

    What each row sees is found at the first layer with a window, and holds for the others. No gradients.
    """

    def __init__(self, rows: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._starts = [0, *accumulate(own.numel() for own in rows)]
        self._few = [request for request, own in enumerate(rows) if own.numel() <= FEW_ROWS]
        self._many = [request for request, own in enumerate(rows) if own.numel() > FEW_ROWS]
        self._merged = SplitAttention([rows[request] for request in self._many], dtype)
        self._whole = SplitAttention(rows, dtype)  # makes no blocks before it is used
        self._readings: dict[tuple[int | None, int], _Readings] = {}

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        """Attend span by span; see RowAttention."""
        if settings.softcap is not None:  # the kernel has none
            return self._whole.attend(query, sources, settings)
        out = self._attend_to_spans(query, sources, settings) if self._few else torch.empty_like(query)
        if self._many:
            parts = split_packed(query, self._rows)
            packed = torch.cat([parts[request] for request in self._many], dim=2)
            own = [sources[request] for request in self._many]
            done = self._merged.attend(packed, own, settings)
            ends = accumulate(self._rows[request].numel() for request in self._many)
            for request, end in zip(self._many, ends, strict=True):
                start, count = self._starts[request], self._rows[request].numel()
                out[:, :, start : start + count] = done[:, :, end - count : end]
        return out

    def _attend_to_spans(
        self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings
    ) -> Tensor:
        """Return the attention (1, H, ΣT, D) of all requests with few rows; zeros for the others."""
        kv_heads = sources[0].private.keys.shape[1]
        grouped = query[0].unflatten(0, (kv_heads, -1)).transpose(1, 2)  # (G, ΣT, H/G, D)
        count, sharing = grouped.shape[1:3]
        shape = settings.window, sharing
        if shape not in self._readings:
            self._readings[shape] = self._find_readings(sources, *shape)
        readings = self._readings[shape]
        packed = grouped[:, readings.rows].flatten(1, 2)[None]  # (1, G, ΣR · H/G, D)
        results, masses = [], []
        for request, index, part, mask in readings.spans:
            span = sources[request].spans[index]
            keys, values = with_contiguous_rows(span.keys), with_contiguous_rows(span.values)
            result, mass = fused_attention(packed[:, :, part], keys, values, mask, settings.scaling)
            results.append(result)
            masses.append(mass)
        result = torch.cat(results, 2)[0].unflatten(1, (-1, sharing)).float()  # (G, ΣR, H/G, D)
        mass = torch.cat(masses, 2)[0].unflatten(1, (-1, sharing)).float()  # (G, ΣR, H/G)
        # A softmax over the spans of each row, of which each has the mass of its logits.
        highest = mass[:, readings.places].amax(2)  # (G, ΣT, H/G)
        weight = (mass - highest[:, readings.rows]).exp_()
        total = torch.zeros_like(highest).index_add_(1, readings.rows, weight)
        joined = result.new_zeros(kv_heads, count, sharing, result.shape[-1])
        joined.index_add_(1, readings.rows, result.mul_(weight[..., None]))
        total.clamp_(min=torch.finfo(total.dtype).tiny)  # rows of other requests have none
        joined /= total[..., None]
        out: Tensor = joined.transpose(1, 2).flatten(0, 1)[None].to(query.dtype)
        return out

    def _find_readings(
        self, sources: Sequence[AttentionInput], window: int | None, sharing: int
    ) -> _Readings:
        found: dict[tuple[int, int, int], _Reading] = {}  # by where the keys are in memory and in the prompt
        for request in self._few:
            spans = sources[request].spans
            for row, index, mask in self._seen(request, sources[request], window):
                span = spans[index]
                key = span.keys.data_ptr(), span.positions.numel(), int(span.positions[0])
                reading = found.setdefault(key, _Reading(request, index))
                reading.rows.append(row)
                reading.masks.append(mask)
        rows = [row for reading in found.values() for row in reading.rows]
        edges = accumulate((len(reading.rows) * sharing for reading in found.values()), initial=0)
        read = [
            (reading.request, reading.index, slice(*part), reading.mask(sharing))
            for reading, part in zip(found.values(), pairwise(edges), strict=True)
        ]
        return _Readings(torch.tensor(rows), _places(rows, self._starts[-1]), read)

    def _seen(
        self, request: int, source: AttentionInput, window: int | None
    ) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield which packed row of a request sees which of its spans; with a mask (S,), unless it sees all of the span."""
        edges = [0, *accumulate(span.positions.numel() for span in source.spans)]
        mask = additive_mask(self._rows[request], _positions(source.spans), window, self._dtype)  # (T, S)
        shared = mask[:, : edges[-2]]
        shared.masked_fill_(torch.isin(_positions(source.shared), source.skip), float("-inf"))
        visible = F.pad((mask == 0).cumsum(1), (1, 0))[:, edges].diff(dim=1)  # (T, spans)
        lengths = torch.tensor(edges).diff()
        whole = (visible == lengths).tolist()
        for row, index in visible.nonzero().tolist():
            part = None if whole[row][index] else mask[row, edges[index] : edges[index + 1]]
            yield self._starts[request] + row, index, part


def _positions(spans: Sequence[KVRows]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *(span.positions for span in spans)])


def _places(rows: Sequence[int], count: int) -> Tensor:
    """Return where each of `count` rows is in `rows`, (count, most); the last place again as often as needed, or 0."""
    places: list[list[int]] = [[] for _ in range(count)]
    for place, row in enumerate(rows):
        places[row].append(place)
    most = max(map(len, places))
    return torch.tensor([own + (own[-1:] or [0]) * (most - len(own)) for own in places])
