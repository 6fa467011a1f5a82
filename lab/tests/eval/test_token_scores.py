"""Scores of tokens, against what they are defined as."""

import pytest
import torch

from kvweave.models.prompt import SEPARATOR, PromptTemplate
from kvweave.testing import tiny_tokenizer
from kvweave_lab.scores import context_offsets, kv_deviation, residual_norms, transfer_scores

KV_HEADS, WIDTH = 2, 8


def test_residual_norms_are_eq_5():
    generator = torch.Generator().manual_seed(0)
    weights, stale_weights = torch.rand(2, 6, generator=generator)
    values, stale_values = torch.randn(2, KV_HEADS, 6, WIDTH, generator=generator)
    got = residual_norms(weights, values, stale_weights, stale_values)
    for token in range(6):
        off = weights[token] * values[:, token] - stale_weights[token] * stale_values[:, token]
        assert got[token].item() == pytest.approx(off.flatten().norm().item(), rel=1e-5)


def test_kv_deviation_is_eq_7_and_does_not_overflow_in_half_precision():
    full, stale = torch.zeros(KV_HEADS, 3, WIDTH), torch.zeros(KV_HEADS, 3, WIDTH)
    stale[:, 1] = 2.0
    stale[0, 2, 0] = -3.0
    assert kv_deviation(full, stale).tolist() == [0.0, 4.0 * KV_HEADS * WIDTH, 9.0]
    large = torch.full((1, 1, 1), 300.0, dtype=torch.float16)
    assert kv_deviation(large, torch.zeros_like(large)).item() == 90_000


def test_scores_are_split_over_characters():
    got = transfer_scores(torch.tensor([1.0, 2.0]), [(0, 2), (2, 4)], [(0, 1), (1, 4)], 4)
    assert got.tolist() == [0.5, 2.5]


def test_tokens_that_share_a_character_share_its_score():
    got = transfer_scores(torch.tensor([1.0, 2.0]), [(0, 1), (1, 3)], [(0, 1), (0, 1), (1, 3)], 3)
    assert got.tolist() == [0.5, 0.5, 2.0]


def test_tokens_without_characters_lose_nothing():
    got = transfer_scores(torch.tensor([1.0, 2.0, 4.0]), [(0, 0), (0, 2), (2, 2)], [(0, 1), (1, 2)], 2)
    assert got.sum().item() == pytest.approx(7)


def test_context_offsets_are_those_of_the_chunks_in_order():
    template = PromptTemplate(tiny_tokenizer())
    first, second = template.chunk_offsets("the inn"), template.chunk_offsets("größer")
    before = len("the inn" + SEPARATOR)
    assert context_offsets(template, ("the inn", "größer")) == [
        *first,
        *((before + start, before + end) for start, end in second),
    ]
