"""Every implementation of attention over chosen rows against the definition, request by request.

Without a GPU the kernel runs in Triton's interpreter (see conftest.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvweave.ops import blocked_attention
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, RowAttention
from kvweave.ops.blocked_attention import BlockedAttention, SplitAttention
from kvweave.ops.row_attention import has_triton, row_attention
from kvweave.ops.span_attention import SpanAttention
from support.definitions import ReferenceAttention, attend_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def paged() -> ModuleType:
    pytest.importorskip("triton", reason="the extra gpu is not installed")
    return import_module("kvweave.ops.paged_attention")


def kernel(rows: Sequence[Tensor]) -> RowAttention:
    found: RowAttention = paged().PagedAttention(rows)
    return found


IMPLEMENTATIONS: dict[str, Callable[[Sequence[Tensor]], RowAttention]] = {
    "reference": ReferenceAttention,
    "blocks": lambda rows: BlockedAttention(rows, torch.float32),
    "split": lambda rows: SplitAttention(rows, torch.float32),
    "spans": lambda rows: SpanAttention(rows, torch.float32),
    "kernel": kernel,
}


@dataclass(frozen=True)
class Case:
    """The queried rows and the attention inputs of several requests, and a packed query for all."""

    rows: list[Tensor]
    given: list[AttentionInput]
    query: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Requests over a few shared chunks, in any order, with private rows between them and in place of their rows."""
    kv_heads, group = draw(st.sampled_from([(2, 2), (1, 7), (3, 1)]))
    width = draw(st.sampled_from([8, 24]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def rows_at(positions: Tensor) -> KVRows:
        shape = (1, kv_heads, positions.numel(), width)
        keys, values = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
        return KVRows(keys, values, positions.to(DEVICE))

    sizes = draw(st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 100]), min_size=1, max_size=3))
    chunks = [rows_at(torch.arange(size)) for size in sizes]
    requests = draw(st.lists(st.lists(st.integers(-5, len(chunks) - 1), max_size=4), min_size=1, max_size=3))
    rows, given = [], []
    for pieces in requests:
        shared, computed, stale, length = [], [], [], 0
        for piece in pieces:
            if piece < 0:  # -piece rows without stored KV
                computed += range(length, length - piece)
                length -= piece
                continue
            size = sizes[piece]
            shared.append(replace(chunks[piece], positions=torch.arange(length, length + size).to(DEVICE)))
            chosen = draw(st.sampled_from(["none", "some", "all"])) if size else "none"
            if chosen == "some":
                again = draw(st.sets(st.integers(length, length + size - 1), max_size=8))
            else:
                again = set(range(length, length + size)) if chosen == "all" else set()
            computed += sorted(again)
            stale += sorted(again)
            length += size
        computed.append(length)
        # Decoding queries the last row alone, prefill all computed rows.
        asked = computed if draw(st.booleans()) else computed[-draw(st.integers(1, 3)) :]
        rows.append(torch.tensor(asked, device=DEVICE))
        skip = torch.tensor(stale, dtype=torch.long, device=DEVICE)
        given.append(AttentionInput(tuple(shared), rows_at(torch.tensor(computed)), skip))
    total = sum(own.numel() for own in rows)
    query = torch.randn(1, kv_heads * group, total, width, generator=generator).to(DEVICE)
    return Case(rows, given, query)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=40, deadline=None)
@given(case=cases(), window=st.sampled_from([None, 1, 7, 80]), softcap=st.sampled_from([None, 3.0]))
def test_every_implementation_agrees_with_the_definition(
    name: str, case: Case, window: int | None, softcap: float | None
) -> None:
    attention = IMPLEMENTATIONS[name](case.rows)
    how = AttentionSettings(0.3, window, softcap)
    got = attention.attend(case.query, case.given, how)
    assert got.shape == case.query.shape
    start = 0
    for rows, own in zip(case.rows, case.given, strict=True):
        query = case.query[:, :, start : start + rows.numel()]
        expected = attend_reference(query, rows, own, how)
        torch.testing.assert_close(got[:, :, start : start + rows.numel()], expected, atol=2e-5, rtol=1e-4)
        start += rows.numel()


def three_chunks(seed: int, *, dtype: torch.dtype = torch.float32) -> Case:
    """Two requests over the same three chunks, each of which recomputes its own rows."""
    generator = torch.Generator().manual_seed(seed)

    def rows_at(positions: Tensor) -> KVRows:
        keys, values = (torch.randn(1, 2, positions.numel(), 16, generator=generator) for _ in range(2))
        return KVRows(keys.to(DEVICE, dtype), values.to(DEVICE, dtype), positions.to(DEVICE))

    shared = tuple(rows_at(torch.arange(start, start + 70)) for start in (0, 70, 140))
    chosen = [torch.tensor([3, 71, 100, 210, 211]), torch.tensor([0, 139, 140, 210])]
    given = [AttentionInput(shared, rows_at(rows), skip=rows[rows < 210].to(DEVICE)) for rows in chosen]
    query = torch.randn(1, 6, 9, 16, generator=generator).to(DEVICE, dtype)
    return Case([rows.to(DEVICE) for rows in chosen], given, query)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_next_layer_has_other_keys_at_the_same_positions(name: str) -> None:
    first, second = three_chunks(0), three_chunks(1)
    attention = IMPLEMENTATIONS[name](first.rows)
    attention.attend(first.query, first.given, AttentionSettings(0.3))
    again = attention.attend(second.query, second.given, AttentionSettings(0.3))
    alone = IMPLEMENTATIONS[name](second.rows).attend(second.query, second.given, AttentionSettings(0.3))
    assert torch.equal(again, alone)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_stale_copies_are_not_seen_and_inputs_are_not_changed(name: str) -> None:
    case = three_chunks(0)
    spans = [span for own in case.given for span in own.spans]
    held = [span.keys.sum() for span in spans]
    attention = IMPLEMENTATIONS[name](case.rows)
    before = attention.attend(case.query, case.given, AttentionSettings(0.3))
    assert [span.keys.sum() for span in spans] == held
    # Row 3 is stale for the first request alone: only the second may notice that its copy changes.
    case.given[0].shared[0].keys[:, :, 3] += 5
    case.given[0].shared[0].values[:, :, 3] += 5
    after = attention.attend(case.query, case.given, AttentionSettings(0.3))
    assert torch.equal(after[:, :, :5], before[:, :, :5])
    assert not torch.equal(after[:, :, 5:], before[:, :, 5:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["kernel", "split", "blocks"])
def test_other_dtypes_stay_near_the_definition(name: str, dtype: torch.dtype) -> None:
    if name == "kernel" and dtype != torch.float16:
        pytest.skip("the interpreter has float16 and float32")
    case = three_chunks(0, dtype=dtype)
    made = {"kernel": kernel, "split": SplitAttention, "blocks": BlockedAttention}[name]
    attention = made(case.rows) if name == "kernel" else made(case.rows, dtype)
    expected = ReferenceAttention(case.rows).attend(case.query, case.given, AttentionSettings(0.3))
    got = attention.attend(case.query, case.given, AttentionSettings(0.3))
    assert got.dtype == dtype
    allowed = 4 * torch.finfo(dtype).eps + 1e-6  # the definition computes in float32
    torch.testing.assert_close(got, expected, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_views_of_stored_tensors_are_read_in_place(name: str) -> None:
    case = three_chunks(0)
    stored = torch.randn(2, 2, 1, 2, 70, 16, device=DEVICE)[1]  # one layer of (L, 2, B, G, S, D)
    shared = (KVRows(stored[0], stored[1], torch.arange(70, device=DEVICE)), *case.given[0].shared[1:])
    transposed = case.given[0].private.keys.transpose(2, 3).contiguous().transpose(2, 3)
    private = replace(case.given[0].private, keys=transposed)
    given = [replace(case.given[0], shared=shared, private=private)]
    query = case.query[:, :, :5]
    expected = ReferenceAttention(case.rows[:1]).attend(query, given, AttentionSettings(0.3))
    got = IMPLEMENTATIONS[name](case.rows[:1]).attend(query, given, AttentionSettings(0.3))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["split", "blocks"])
def test_a_whole_prompt_may_have_any_memory_layout(name: str) -> None:
    """With one query head per KV head, nothing is copied on the way to the kernel."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 2, 16, 90, generator=generator).transpose(2, 3) for _ in range(3))
    rows = [torch.tensor([4, 40, 89])]
    given = [AttentionInput((), KVRows(keys, values, torch.arange(90)), torch.empty(0))]
    got = IMPLEMENTATIONS[name](rows).attend(query[:, :, :3], given, AttentionSettings(0.3))
    expected = ReferenceAttention(rows).attend(query[:, :, :3], given, AttentionSettings(0.3))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_each_position_of_a_request_is_visible_in_one_page() -> None:
    case = three_chunks(0)
    pages, hidden = paged().cut_pages(case.given), paged().HIDDEN
    for request in range(2):
        own = slice(int(pages.edges[request]), int(pages.edges[request + 1]))
        shown = pages.positions[own][pages.positions[own] != hidden]
        last = int(case.rows[request][-1])
        assert shown.sort().values.tolist() == list(range(last + 1))
        for (low, high), positions in zip(pages.bounds[own].tolist(), pages.positions[own], strict=True):
            visible = positions[positions != hidden]
            assert (low, high) == (int(visible.min()), int(visible.max()))


def test_pages_of_stale_rows_only_are_left_out() -> None:
    rows = paged().PAGE_ROWS
    positions = torch.arange(3 * rows)
    keys = torch.zeros(1, 1, 3 * rows, 8)
    stale = positions[rows : 2 * rows]
    private = KVRows(keys[:, :, :rows], keys[:, :, :rows], stale)
    pages = paged().cut_pages([AttentionInput((KVRows(keys, keys, positions),), private, skip=stale)])
    assert pages.places.tolist() == [[0, 0], [0, 2 * rows], [1, 0]]


@pytest.fixture
def two_rows_to_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of two rows, or three at the end; three heads share keys."""
    for name, queries in (("LARGE", 6), ("LARGE_STEP", 1), ("SMALL", 6), ("SMALL_STEP", 1)):
        monkeypatch.setattr(blocked_attention, name, queries)
    monkeypatch.setattr(blocked_attention.torch, "get_num_threads", lambda: 1)


@pytest.mark.parametrize(
    ("window", "unmasked"),
    [(None, [3, 100, 0, 140]), (120, [3, 8, 0, 49]), (90, [3, 0, 0, 19]), (30, [0, 0, 0, 0])],
)
@pytest.mark.usefixtures("two_rows_to_a_block")
def test_keys_that_all_rows_of_a_block_see_need_no_mask(
    window: int | None, unmasked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window, masked keys are on both sides of the others, or all keys are masked."""
    case, seen = three_chunks(0), []  # [a block's query, keys without a mask]
    fused = blocked_attention.fused_attention

    def recording(query, keys, *others):
        if seen and query is seen[-1][0]:
            seen[-1][1] = keys.shape[2]
        else:
            seen.append([query, 0])
        return fused(query, keys, *others)

    monkeypatch.setattr(blocked_attention, "fused_attention", recording)
    attention = SplitAttention(case.rows, torch.float32)
    got = attention.attend(case.query, case.given, AttentionSettings(0.3, window))
    expected = ReferenceAttention(case.rows).attend(case.query, case.given, AttentionSettings(0.3, window))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert [keys for _, keys in seen] == unmasked


@pytest.mark.usefixtures("two_rows_to_a_block")
def test_very_large_masks_are_made_again_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made = three_chunks(0), []
    make = blocked_attention.additive_mask
    monkeypatch.setattr(blocked_attention, "additive_mask", lambda *how: made.append(how) or make(*how))
    for kept, masks in ((blocked_attention.MAX_KEPT_MASKS, 4), (0, 8)):  # of four blocks, in two layers
        monkeypatch.setattr(blocked_attention, "MAX_KEPT_MASKS", kept)
        attention = SplitAttention(case.rows, torch.float32)
        first, second = (attention.attend(case.query, case.given, AttentionSettings(0.3)) for _ in range(2))
        assert torch.equal(first, second)
        assert len(made) == masks
        made.clear()


def test_a_whole_step_of_the_kernel_may_be_masked() -> None:
    """The kernel takes 512 keys at a time; the last row's window starts after the first step."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.tensor([0, 5, 1300])]
    keys, values = (torch.randn(1, 1, 1400, 8, generator=generator) for _ in range(2))
    query = torch.randn(1, 2, 3, 8, generator=generator)
    given = [AttentionInput((), KVRows(keys, values, torch.arange(1400)), torch.empty(0))]
    got = SplitAttention(rows, torch.float32).attend(query, given, AttentionSettings(0.3, 700))
    expected = ReferenceAttention(rows).attend(query, given, AttentionSettings(0.3, 700))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_a_cpu_gets_the_implementation_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    some, whole = torch.tensor([2, 5]), torch.arange(3)
    for dtype in (torch.bfloat16, torch.float32):
        assert isinstance(row_attention([whole, some], dtype), SplitAttention)
        assert isinstance(row_attention([whole], dtype), BlockedAttention)
    monkeypatch.setattr("kvweave.ops.row_attention.can_split", lambda: False)
    assert isinstance(row_attention([some], torch.float32), BlockedAttention)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_kernel_if_triton_is_installed() -> None:
    taken = row_attention([torch.arange(3, device="cuda")], torch.float32)
    assert isinstance(taken, BlockedAttention) != has_triton()


@pytest.mark.parametrize("name", ["split", "blocks"])
def test_a_request_without_rows_adds_nothing(name):
    generator = torch.Generator().manual_seed(0)
    held = KVRows(*(torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2)), torch.arange(9))
    rows = [torch.arange(5, 9), torch.empty(0, dtype=torch.long)]
    query, given = (
        torch.randn(1, 4, 4, 8, generator=generator),
        [AttentionInput((), held, torch.empty(0))] * 2,
    )
    made = IMPLEMENTATIONS[name](rows).attend(query, given, AttentionSettings(0.3))
    torch.testing.assert_close(made, ReferenceAttention(rows).attend(query, given, AttentionSettings(0.3)))
