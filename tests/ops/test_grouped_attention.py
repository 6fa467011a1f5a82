"""Grouped attention: the fast version against the definition, the definition against single numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import InvalidRequest
from kvweave.ops import attention as logits
from kvweave.ops.attention import AttentionInput, AttentionSettings, KVRows
from kvweave.ops.grouped_attention import ContextGroup, attend_grouped
from support.definitions import attend_grouped_reference, attend_reference

WIDTH, KV_HEADS, HEADS = 8, 2, 4


def prompt(keys: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 1, KV_HEADS, keys, WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()


def stored(keys: torch.Tensor, values: torch.Tensor) -> AttentionInput:
    positions = torch.arange(keys.shape[2])
    return AttentionInput((), KVRows(keys, values, positions), skip=positions[:0])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[int], tuple[int, int], int]:
    """Prompt length, query rows, the context's columns, seed."""
    length = draw(st.integers(1, 30))
    rows = draw(st.lists(st.integers(0, length - 1), min_size=1, unique=True).map(sorted))
    first = draw(st.integers(0, length))
    return length, rows, (first, draw(st.integers(first, length))), draw(st.integers(0, 2**16))


WINDOWS, CAPS = st.sampled_from([None, 1, 5, 1000]), st.sampled_from([None, 3.0])


@settings(max_examples=150, deadline=None)
@given(layouts(), WINDOWS, CAPS, st.sampled_from([0.5, 0.9, 2.0]), st.sampled_from([0.5, 0.9, 1.5]))
def test_the_fast_version_equals_the_definition(layout, window, softcap, temperature, scale):
    length, positions, columns, seed = layout
    rows, (keys, values) = torch.tensor(positions), prompt(length, seed)
    query = torch.randn(1, HEADS, len(rows), WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    group = ContextGroup(*columns, temperature, scale)
    how = AttentionSettings(0.3, window, softcap)
    expected = attend_grouped_reference(query, rows, stored(keys, values), group, how)
    assert expected.isfinite().all()
    got = attend_grouped(query, rows, keys, values, group, how)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(layouts(), WINDOWS, CAPS)
def test_at_temperature_and_scale_1_it_is_plain_attention(layout, window, softcap):
    length, positions, columns, seed = layout
    rows, (keys, values) = torch.tensor(positions), prompt(length, seed)
    query = torch.randn(1, HEADS, len(rows), WIDTH, generator=torch.Generator().manual_seed(seed + 1))
    how = AttentionSettings(0.3, window, softcap)
    expected = attend_reference(query, rows, stored(keys, values), how)
    group = ContextGroup(*columns, 1, 1)
    got = attend_grouped_reference(query, rows, stored(keys, values), group, how)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_the_definition_number_by_number():
    """One head, one row, four keys of which the middle two are the context; no tensor arithmetic."""
    logit, value = [0.4, -1.0, 1.5, 0.2], [1.0, 10.0, 100.0, 1000.0]
    temperature, scale = 0.8, 0.7
    context = [math.exp(each / temperature) for each in logit[1:3]]
    others = [math.exp(logit[0]), math.exp(logit[3])]
    context_mass = math.exp(math.log(sum(context)) * scale * temperature)
    share = context_mass / (context_mass + sum(others))
    expected = share * (context[0] * value[1] + context[1] * value[2]) / sum(context)
    expected += (1 - share) * (others[0] * value[0] + others[1] * value[3]) / sum(others)

    keys, values = torch.tensor(logit).reshape(1, 1, 4, 1), torch.tensor(value).reshape(1, 1, 4, 1)
    query, rows = torch.ones(1, 1, 1, 1), torch.tensor([3])
    group = ContextGroup(1, 3, temperature, scale)
    got = attend_grouped_reference(query, rows, stored(keys, values), group, AttentionSettings(1.0))
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_blocks_of_rows_change_nothing(monkeypatch):
    keys, values = prompt(20, 0)
    query, rows, group = torch.randn(1, HEADS, 9, WIDTH), torch.arange(11, 20), ContextGroup(3, 11, 0.9, 0.9)
    whole = attend_grouped(query, rows, keys, values, group, AttentionSettings(1.0))
    monkeypatch.setattr(logits, "MAX_LOGITS", 2 * HEADS * 20)
    torch.testing.assert_close(
        attend_grouped(query, rows, keys, values, group, AttentionSettings(1.0)), whole
    )


def test_no_rows_give_nothing():
    keys, values = prompt(5, 0)
    query, rows = torch.randn(1, HEADS, 0, WIDTH), torch.empty(0, dtype=torch.long)
    got = attend_grouped(query, rows, keys, values, ContextGroup(1, 3, 0.9, 0.9), AttentionSettings(1.0))
    assert got.shape == (1, HEADS, 0, WIDTH)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_or_scale_that_is_not_above_0_is_refused(temperature):
    with pytest.raises(InvalidRequest, match="above 0"):
        ContextGroup(0, 3, temperature, 1.0)
    with pytest.raises(InvalidRequest, match="above 0"):
        ContextGroup(0, 3, 1.0, temperature)


def test_columns_that_end_before_they_begin_are_refused():
    with pytest.raises(InvalidRequest, match="from 5 to 3"):
        ContextGroup(5, 3, 0.9, 0.9)
