"""The fast attention over contiguous keys against the definition over spans, private rows and skips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops import blocked_attention
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows, merge_spans
from kvweave.ops.blocked_attention import RowBlocks, attend_rows
from support.definitions import attend_reference

WIDTH, KV_HEADS, HEADS = 8, 2, 4


def random_rows(positions: torch.Tensor, generator: torch.Generator) -> KVRows:
    shape = (1, KV_HEADS, positions.numel(), WIDTH)
    return KVRows(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), positions)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int], int]:
    """Prompt length, shared spans, computed rows (all uncovered ones and some covered ones), seed."""
    cuts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    length, spans, rows = 0, [], []
    for size in cuts:
        if draw(st.booleans()):
            spans.append((length, length + size))
            rows += draw(st.lists(st.integers(length, length + size - 1), unique=True)) if size else []
        else:
            rows += range(length, length + size)
        length += size
    rows.append(length)  # the question: at least one row, the last one
    return length + 1, spans, sorted(rows), draw(st.integers(0, 2**16))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from([None, 1, 5, 1000]), st.sampled_from([None, 3.0]))
def test_blocks_over_merged_keys_equal_the_definition(
    layout: tuple[int, list[tuple[int, int]], list[int], int], window: int | None, softcap: float | None
) -> None:
    length, spans, rows, seed = layout
    generator = torch.Generator().manual_seed(seed)
    positions = torch.tensor(rows)
    shared = tuple(random_rows(torch.arange(a, b), generator) for a, b in spans)
    given = AttentionInput(shared, random_rows(positions, generator), skip=positions)
    query = torch.randn(1, HEADS, len(rows), WIDTH, generator=generator)

    expected = attend_reference(query, positions, given, AttentionSettings(0.3, window, softcap))
    blocks = RowBlocks(positions, window=window, dtype=query.dtype)
    got = attend_rows(query, given, blocks, AttentionSettings(0.3, softcap=softcap))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    keys, values = merge_spans(given, length)
    merged = AttentionInput((), KVRows(keys, values, torch.arange(length)), skip=positions[:0])
    again = attend_rows(query, merged, blocks, AttentionSettings(0.3, softcap=softcap))
    assert torch.equal(again, got)


def test_shared_spans_are_never_written_to() -> None:
    generator = torch.Generator().manual_seed(0)
    span = random_rows(torch.arange(0, 6), generator)
    before = span.keys.clone(), span.values.clone()
    private = random_rows(torch.tensor([2, 6]), generator)
    keys, _ = merge_spans(AttentionInput((span,), private, skip=torch.tensor([2])), 7)
    keys += 1
    assert torch.equal(span.keys, before[0])
    assert torch.equal(span.values, before[1])


def test_a_skipped_row_has_no_influence() -> None:
    generator = torch.Generator().manual_seed(0)
    span, private = random_rows(torch.arange(0, 6), generator), random_rows(torch.tensor([2, 6]), generator)
    query = torch.randn(1, HEADS, 2, WIDTH, generator=generator)
    given = AttentionInput((span,), private, skip=torch.tensor([2]))
    before = attend_reference(query, private.positions, given, AttentionSettings(0.3))
    span.keys[:, :, 2] += 100
    assert torch.equal(attend_reference(query, private.positions, given, AttentionSettings(0.3)), before)


def test_a_full_prefill_needs_no_mask() -> None:
    rows = RowBlocks(torch.arange(100), window=None, dtype=torch.float32)
    (block,) = rows.blocks
    assert block.causal
    assert rows.mask(block) is None


def test_large_passes_are_cut_and_hold_no_large_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowBlocks(torch.arange(1000, 5000), window=None, dtype=torch.float32)
    assert max(b.end - b.start for b in rows.blocks) <= 512
    assert [b.start for b in rows.blocks[1:]] == [b.end for b in rows.blocks[:-1]]
    assert rows.mask(rows.blocks[0]) is rows.mask(rows.blocks[0])
    monkeypatch.setattr(blocked_attention, "MAX_KEPT_MASKS", 1000)
    large = RowBlocks(torch.arange(1000, 5000), window=None, dtype=torch.float32)
    first, again = large.mask(large.blocks[0]), large.mask(large.blocks[0])
    assert first is not again
    assert torch.equal(first, again)


def test_no_rows_no_blocks() -> None:
    assert RowBlocks(torch.empty(0, dtype=torch.long), window=None, dtype=torch.float32).blocks == ()


def test_adjacent_rows_are_one_block() -> None:
    """All rows of a question after a long context see nearly the same keys; rows spread over the prompt do not."""
    generator = torch.Generator().manual_seed(0)
    stored = random_rows(torch.arange(700), generator)
    given = AttentionInput((), stored, torch.empty(0, dtype=torch.long))
    for positions, count in (
        (torch.arange(660, 700), 1),
        (torch.arange(20, 700, 17), blocked_attention.MIN_BLOCKS),
    ):
        query = torch.randn(1, HEADS, positions.numel(), WIDTH, generator=generator)
        for window in (None, 690):
            rows = RowBlocks(positions, window=window, dtype=query.dtype)
            assert len(rows.blocks) == count
            got = attend_rows(query, given, rows, AttentionSettings(0.3))
            expected = attend_reference(query, positions, given, AttentionSettings(0.3, window))
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (
        len(RowBlocks(torch.arange(660, 700), window=100, dtype=query.dtype).blocks)
        == blocked_attention.MIN_BLOCKS
    )
