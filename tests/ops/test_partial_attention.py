"""Attention over portions of the keys against the softmax written out."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.ops.partial_attention import PartialAttention

G, H, D = 2, 6, 5


def written_out(query, keys, values, visible, scaling, softcap):
    keys, values, visible = (x.repeat_interleave(H // G, 0) for x in (keys, values, visible))
    logits = query[0] @ keys.transpose(1, 2) * scaling  # (H, T, n)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return (logits.masked_fill(~visible, float("-inf")).softmax(-1) @ values)[None]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    softcap=st.sampled_from([None, 3.0]),
)
def test_any_number_of_portions_gives_the_whole_result(seed, rows, cuts, softcap):
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(1, H, rows, D, generator=random)
    keys, values = torch.randn(2, G, 20, D, generator=random)
    visible = torch.rand(G, rows, 20, generator=random) > 0.4
    visible[:, :, 7] = True
    attention = PartialAttention(query, G, scaling=0.7, softcap=softcap)
    edges = [0, *sorted(cuts), 20]
    for start, end in pairwise(edges):
        attention.add(keys[:, start:end], values[:, start:end], visible[:, :, start:end])
    expected = written_out(query, keys, values, visible, 0.7, softcap)
    torch.testing.assert_close(attention.result(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (G, 1), (1, 3), (G, 3)])
def test_a_mask_may_be_shared_by_heads_or_rows(shape):
    random = torch.Generator().manual_seed(1)
    query = torch.randn(1, H, 3, D, generator=random)
    keys, values = torch.randn(2, G, 9, D, generator=random)
    visible = torch.rand(*shape, 9, generator=random) > 0.3
    attention = PartialAttention(query, G, scaling=1.0)
    attention.add(keys, values, visible)
    expected = written_out(query, keys, values, visible.expand(G, 3, 9), 1.0, None)
    torch.testing.assert_close(attention.result(), expected, atol=1e-5, rtol=1e-5)


def test_the_log_mass_is_the_log_of_the_softmax_denominator():
    query = torch.randn(1, H, 1, D, generator=torch.Generator().manual_seed(2))
    keys, values = torch.randn(2, G, 9, D, generator=torch.Generator().manual_seed(3))
    attention = PartialAttention(query, G, scaling=0.5)
    attention.add(keys[:, :4], values[:, :4])
    attention.add(keys[:, 4:], values[:, 4:])
    logits = query[0] @ keys.repeat_interleave(H // G, 0).transpose(1, 2) * 0.5
    torch.testing.assert_close(attention.log_mass.flatten(), logits.logsumexp(-1).flatten())
