"""Attention of chosen rows as one Triton kernel that reads shared spans and private rows in place.

FusionRAG §4.3 (Q-Sparse-Attn): query rows are given by position, so that no mask is made or read. Keys after a
block's last row are never loaded, nor are pages full of stale copies. One launch serves all requests of a
pass. Heads that share keys are rows of one block, so that a page is loaded once for all of them.

Needs Triton, which comes with PyTorch for GPUs and with the extra `gpu`. Tests run it on CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
import triton
import triton.language as tl
from torch import Tensor

from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, with_contiguous_rows

PAGE_ROWS = 64
BLOCK_QUERIES = 64  # rows times the heads that share keys, handled by one program
UNLIMITED = 2**30  # a window longer than any prompt
HIDDEN = 2**31 - 1
"""The position of a row that is never seen: a stale copy, or one beyond the end of its span."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of several requests, request by request; int32, on the device of the positions.

    Attributes:
        positions: (P, PAGE_ROWS) prompt positions of each page's rows, HIDDEN for rows that are never seen.
        places: (P, 2) the number of each page's span, as `spans_of` counts them, and the page's first row in that span.
        bounds: (P, 2) the lowest and the highest visible position of each page.
        edges: (requests + 1,) the first page of each request, and the end of the last one's pages.
    """

    positions: Tensor
    places: Tensor
    bounds: Tensor
    edges: Tensor


def spans_of(sources: Sequence[AttentionInput]) -> list[KVRows]:
    """Return all spans in the order in which pages count them: each request's shared ones, then its private rows."""
    return [span for own in sources for span in own.spans]


def cut_pages(sources: Sequence[AttentionInput]) -> Pages:
    """Cut the spans of several requests into pages."""
    spans = [positions for own in sources for positions in _visible_positions(own)]
    requests = [request for request, own in enumerate(sources) for _ in own.spans]
    cut = [_cut_span(positions) for positions in spans]
    sizes = torch.tensor([pages.shape[0] for pages in cut])
    positions = torch.cat(cut)  # (P, PAGE_ROWS)
    numbers = torch.arange(len(spans)).repeat_interleave(sizes)
    firsts = (torch.arange(len(numbers)) - (sizes.cumsum(0) - sizes)[numbers]) * PAGE_ROWS
    places = torch.stack([numbers, firsts], dim=1).to(positions)
    visible = positions != HIDDEN
    kept = visible.any(dim=1)
    bounds = torch.stack([positions.amin(dim=1), positions.masked_fill(~visible, -1).amax(dim=1)], dim=1)
    owners = torch.tensor(requests)[numbers].to(kept.device)[kept]
    edges = torch.searchsorted(owners, torch.arange(len(sources) + 1, device=kept.device), out_int32=True)
    return Pages(positions[kept], places[kept], bounds[kept], edges)


def _visible_positions(own: AttentionInput) -> list[Tensor]:
    """Return the positions of every span, int32, HIDDEN for shared rows that are stale."""
    shared = (span.positions.masked_fill(torch.isin(span.positions, own.skip), HIDDEN) for span in own.shared)
    return [positions.to(torch.int32) for positions in (*shared, own.private.positions)]


def _cut_span(positions: Tensor) -> Tensor:
    """Return one span's positions as pages, (pages, PAGE_ROWS)."""
    return F.pad(positions, (0, -positions.numel() % PAGE_ROWS), value=HIDDEN).reshape(-1, PAGE_ROWS)


class PagedAttention:
    """Attention of the packed rows of several requests, `rows` (T,) each, ascending; see RowAttention.

    The positions of all keys are read from the first layer's input.
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows
        self._positions = torch.cat(list(rows)).to(torch.int32)
        self._pages: Pages | None = None
        self._blocks: dict[int, Tensor] = {}  # by their size

    def attend(self, query: Tensor, sources: Sequence[AttentionInput], settings: AttentionSettings) -> Tensor:
        """Attend in one launch over all requests; see RowAttention."""
        assert query.shape[0] == 1
        spans = spans_of(sources)
        kv_heads, width = spans[0].keys.shape[1], spans[0].keys.shape[3]
        group = query.shape[1] // kv_heads
        if self._pages is None:
            self._pages = cut_pages(sources)
        size = max(1, BLOCK_QUERIES // group)
        pages, blocks = self._pages, self._blocks_of(size)
        query = query.contiguous()
        out = torch.empty_like(query)
        if not blocks.shape[0]:
            return out
        addresses, strides, tensors = _addresses(spans, query.device)
        _attend[(blocks.shape[0], kv_heads)](
            query,
            out,
            self._positions,
            blocks,
            pages.edges,
            pages.positions,
            pages.places,
            pages.bounds,
            addresses,
            strides,
            settings.scaling,
            UNLIMITED if settings.window is None else settings.window,
            0.0 if settings.softcap is None else settings.softcap,
            query.shape[2],
            width,
            group=group,
            block_queries=max(16, triton.next_power_of_2(size * group)),
            block_width=max(16, triton.next_power_of_2(width)),
            page_rows=PAGE_ROWS,
            hidden=HIDDEN,
            capped=settings.softcap is not None,
        )
        del tensors  # the addresses point into them, so they must live until the launch is queued
        return out

    def _blocks_of(self, size: int) -> Tensor:
        """Return (blocks, 3): each block's request, its first row in the packed query, and the row after its last."""
        if size not in self._blocks:
            edges = list(accumulate((own.numel() for own in self._rows), initial=0))
            found = [
                (request, start, min(start + size, edges[request + 1]))
                for request in range(len(self._rows))
                for start in range(edges[request], edges[request + 1], size)
            ]
            table = torch.tensor(found, dtype=torch.int32, device=self._positions.device)
            self._blocks[size] = table.reshape(-1, 3)
        return self._blocks[size]


def _addresses(spans: Sequence[KVRows], device: torch.device) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (spans, 2) addresses of keys and values, (spans, 4) their strides, and the tensors themselves.

    Strides are from head to head and from row to row, of keys, then of values, in elements.
    """
    tensors = [with_contiguous_rows(tensor) for span in spans for tensor in (span.keys, span.values)]
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    strides = torch.tensor([(tensor.stride(1), tensor.stride(2)) for tensor in tensors], dtype=torch.int64)
    return addresses.reshape(-1, 2).to(device), strides.reshape(-1, 4).to(device), tensors


# Another number of rows must not compile the kernel again. Arguments are pointers and numbers without Python types.
@triton.jit(do_not_specialize=["query_rows"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    out,
    rows,
    blocks,
    edges,
    positions,
    places,
    bounds,
    addresses,
    strides,
    scaling,
    window,
    softcap,
    query_rows,
    width,
    group: tl.constexpr,
    block_queries: tl.constexpr,
    block_width: tl.constexpr,
    page_rows: tl.constexpr,
    hidden: tl.constexpr,
    capped: tl.constexpr,
):
    """Attend for one block of one request's rows and the query heads of one KV head, over all pages that it can see.

    Keeps a running softmax over the pages in float32 (most: the largest logit so far, mass: the sum of weights).
    """
    block, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(blocks + block * 3)
    first = tl.load(blocks + block * 3 + 1)
    end = tl.load(blocks + block * 3 + 2)
    numbers = tl.arange(0, block_queries)  # row by row, the heads that share keys side by side
    row = first + numbers // group
    real = row < end
    position = tl.load(rows + row, mask=real, other=-1)
    lowest, highest = tl.load(rows + first), tl.load(rows + end - 1)
    dims = tl.arange(0, block_width)
    query_head = head * group + numbers % group
    at = (query_head * query_rows + row).to(tl.int64)[:, None] * width + dims[None, :]
    wide = real[:, None] & (dims[None, :] < width)
    q = tl.load(query + at, mask=wide, other=0.0)  # (block_queries, block_width)

    most = tl.full([block_queries], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([block_queries], dtype=tl.float32)
    total = tl.zeros([block_queries, block_width], dtype=tl.float32)
    inside = tl.arange(0, page_rows)
    for page in range(tl.load(edges + request), tl.load(edges + request + 1)):
        near = tl.load(bounds + page * 2 + 1) > lowest - window
        if (tl.load(bounds + page * 2) <= highest) & near:
            span = tl.load(places + page * 2)
            where = tl.load(positions + page * page_rows + inside)
            there = where != hidden
            within = (tl.load(places + page * 2 + 1) + inside).to(tl.int64)
            loaded = there[:, None] & (dims[None, :] < width)
            key_at = tl.load(addresses + span * 2).to(tl.pointer_type(query.dtype.element_ty))
            key_at += head * tl.load(strides + span * 4)
            key_rows = within * tl.load(strides + span * 4 + 1)
            k = tl.load(key_at + key_rows[:, None] + dims[None, :], mask=loaded, other=0.0)
            value_at = tl.load(addresses + span * 2 + 1).to(tl.pointer_type(query.dtype.element_ty))
            value_at += head * tl.load(strides + span * 4 + 2)
            value_rows = within * tl.load(strides + span * 4 + 3)
            v = tl.load(value_at + value_rows[:, None] + dims[None, :], mask=loaded, other=0.0)

            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling  # (block_queries, page_rows)
            if capped:
                logits = (2 * tl.sigmoid(2 * logits / softcap) - 1) * softcap  # tanh
            seen = (where[None, :] <= position[:, None]) & (where[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
            higher = tl.maximum(most, tl.max(logits, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key
            kept = tl.exp(most - shift)
            weights = tl.exp(logits - shift[:, None])
            mass = mass * kept + tl.sum(weights, axis=1)
            total = total * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            most = higher
    mass = tl.where(real, mass, 1.0)
    tl.store(out + at, (total / mass[:, None]).to(out.dtype.element_ty), mask=wide)
