"""Scores of tokens against their definitions written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops import attention as logits
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows
from kvweave.ops.scores import (
    attention_shares,
    mean_attention,
    peak_attention,
    top_tokens,
)
from support.definitions import attend_reference

WIDTH, KV_HEADS, HEADS = 8, 2, 4


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 25).flatmap(
        lambda keys: st.tuples(
            st.just(keys), st.lists(st.integers(0, keys - 1), min_size=1, unique=True).map(sorted)
        )
    ),
    st.sampled_from([None, 1, 5, 1000]),
    st.sampled_from([None, 2.0]),
    st.integers(0, 2**16),
)
def test_attention_scores_equal_the_weights_of_the_definition(layout, window, softcap, seed):
    """With unit vectors as values, the attention output is its weights."""
    keys, positions = layout
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, len(positions), WIDTH, generator=generator)
    key = torch.randn(1, KV_HEADS, keys, WIDTH, generator=generator)
    units = torch.eye(keys).expand(1, KV_HEADS, keys, keys)
    rows = torch.tensor(positions)
    stored = AttentionInput((), KVRows(key, units, torch.arange(keys)), rows[:0])
    weights = attend_reference(query, rows, stored, AttentionSettings(0.3, window, softcap))
    got = mean_attention(query, rows, key, AttentionSettings(0.3, window, softcap))
    torch.testing.assert_close(got, weights.mean(dim=(1, 2)))
    peak = peak_attention(query, rows, key, AttentionSettings(0.3, window, softcap))
    torch.testing.assert_close(peak, weights.amax(dim=(1, 2)))
    parts = torch.arange(keys)[:, None] % 3 == torch.arange(2)  # every third key belongs to no part
    shares = attention_shares(query, rows, key, parts, AttentionSettings(0.3, window, softcap))
    expected = torch.stack([weights[..., number::3].sum(dim=-1).mean(dim=1) for number in range(2)], dim=-1)
    torch.testing.assert_close(shares, expected)


def test_a_row_that_sees_none_of_the_columns_counts_as_zeros():
    query, keys = torch.randn(1, HEADS, 2, WIDTH), torch.randn(1, KV_HEADS, 10, WIDTH)
    got = mean_attention(query, torch.tensor([1, 9]), keys, AttentionSettings(1.0), columns=(4, 8))
    assert got.shape == (1, 4)
    assert got.sum().item() == pytest.approx(0.5)
    near = mean_attention(query, torch.tensor([1, 9]), keys, AttentionSettings(1.0, 1), columns=(4, 8))
    assert torch.equal(near, torch.zeros(1, 4))


def test_no_rows_give_zeros():
    query, keys = torch.randn(1, HEADS, 0, WIDTH), torch.randn(1, KV_HEADS, 5, WIDTH)
    assert torch.equal(
        mean_attention(query, torch.empty(0, dtype=torch.long), keys, AttentionSettings(1.0)),
        torch.zeros(1, 5),
    )


def test_blocks_of_rows_change_nothing(monkeypatch):
    query, keys = torch.randn(1, HEADS, 9, WIDTH), torch.randn(1, KV_HEADS, 12, WIDTH)
    rows = torch.arange(3, 12)
    whole = mean_attention(query, rows, keys, AttentionSettings(1.0))
    peak, parts = peak_attention(query, rows, keys, AttentionSettings(1.0)), torch.eye(keys.shape[2])
    shares = attention_shares(query, rows, keys, parts, AttentionSettings(1.0))
    monkeypatch.setattr(logits, "MAX_LOGITS", 2 * HEADS * 12)
    torch.testing.assert_close(mean_attention(query, rows, keys, AttentionSettings(1.0)), whole)
    torch.testing.assert_close(peak_attention(query, rows, keys, AttentionSettings(1.0)), peak)
    torch.testing.assert_close(attention_shares(query, rows, keys, parts, AttentionSettings(1.0)), shares)


def test_top_tokens_gives_count_tokens_and_ties_go_to_the_first():
    chosen = top_tokens(torch.tensor([[1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    assert chosen.tolist() == [[True, True, False, False], [True, True, False, False]]
    assert not top_tokens(torch.tensor([1.0, 2.0]), 0).any()
