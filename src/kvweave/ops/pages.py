"""Where the keys of several requests lie, page by page, for kernels that read shared spans in place.

A page is PAGE_ROWS rows of one span. What a kernel needs to know about pages is made once for a pass and serves all
layers, since keys and values change from layer to layer and their places do not. A row that must not be seen has a
position that no query row reaches, and pages of nothing but such rows are left out: stale copies cost little, and
a mask is never made. Knows where rows stand, not what they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.ops.attention import AttentionInput, KeyRows

PAGE_ROWS = 64
HIDDEN = 2**31 - 1
"""The position of a row that nobody sees: a stale copy, or one beyond the end of its span."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of several requests, one request behind the other; int32, on the device of the positions.

    Attributes:
        positions: (P, PAGE_ROWS) prompt positions of each page's rows, HIDDEN for those that nobody sees.
        places: (P, 2) which span a page is of, as `spans_of` counts them, and the page's first row in that span.
        bounds: (P, 2) the lowest and the highest position that a page shows.
        edges: (requests + 1,) where each request's pages begin, and where the last one's end.
    """

    positions: Tensor
    places: Tensor
    bounds: Tensor
    edges: Tensor


def spans_of(given: Sequence[AttentionInput]) -> list[KeyRows]:
    """All spans in the order in which pages count them: each request's shared ones, then its private rows."""
    return [span for own in given for span in (*own.shared, own.private)]


def paged(given: Sequence[AttentionInput]) -> Pages:
    """Cut the spans of several requests into pages."""
    spans = [positions for own in given for positions in _shown(own)]
    requests = [request for request, own in enumerate(given) for _ in (*own.shared, own.private)]
    cut = [_cut(positions) for positions in spans]
    sizes = torch.tensor([pages.shape[0] for pages in cut])
    positions = torch.cat(cut)  # (P, PAGE_ROWS)
    numbers = torch.arange(len(spans)).repeat_interleave(sizes)
    firsts = (torch.arange(len(numbers)) - (sizes.cumsum(0) - sizes)[numbers]) * PAGE_ROWS
    places = torch.stack([numbers, firsts], dim=1).to(positions)
    shown = positions != HIDDEN
    kept = shown.any(dim=1)
    bounds = torch.stack([positions.amin(dim=1), positions.masked_fill(~shown, -1).amax(dim=1)], dim=1)
    owners = torch.tensor(requests)[numbers].to(kept.device)[kept]
    edges = torch.searchsorted(owners, torch.arange(len(given) + 1, device=kept.device), out_int32=True)
    return Pages(positions[kept], places[kept], bounds[kept], edges)


def _shown(own: AttentionInput) -> list[Tensor]:
    """The positions of every span, int32, HIDDEN for shared rows that are stale."""
    shared = (span.positions.masked_fill(torch.isin(span.positions, own.skip), HIDDEN) for span in own.shared)
    return [positions.to(torch.int32) for positions in (*shared, own.private.positions)]


def _cut(positions: Tensor) -> Tensor:
    """One span's positions as pages, (pages, PAGE_ROWS)."""
    return F.pad(positions, (0, -positions.numel() % PAGE_ROWS), value=HIDDEN).reshape(-1, PAGE_ROWS)
