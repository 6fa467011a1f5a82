"""Stored keys are rotated by the model's own function, without a query if the function accepts that."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from kvweave.testing import tiny_adapter
from support.prompts import IDS, quiet_adapter


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "phi3-partial", "glm4", "gpt-neox", "cohere"])
def test_keys_rotate_the_same_with_and_without_a_query(family):
    rotation = quiet_adapter(family).rotation
    how, positions = rotation.layers[0], torch.tensor([3, 4, 9])
    keys = torch.randn(1, 2, 3, 8)
    query = torch.randn(1, 4, 3, how.width)
    cos, sin = how.embedding(keys, positions[None], *how.arguments)
    with_query = rotation.apply(query, keys[..., : how.width], cos, sin)[1]
    assert rotation.query_heads == 0
    without = rotation.angles(positions, 10, keys).rotate(0, keys)
    assert torch.equal(without, torch.cat([with_query, keys[..., how.width :]], dim=-1))


def test_a_function_that_needs_a_query_gets_one(monkeypatch):
    plain = tiny_adapter("llama")
    expected = plain.encode(IDS[20:30], plain.encode(IDS[:20]))
    rotate = modeling_llama.apply_rotary_pos_emb

    def needs_query(q, k, cos, sin, *more, **given):
        if not q.numel():
            raise ZeroDivisionError
        return rotate(q, k, cos, sin, *more, **given)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", needs_query)
    adapter = tiny_adapter("llama")
    assert adapter.rotation.query_heads == 1
    assert torch.equal(adapter.encode(IDS[20:30], adapter.encode(IDS[:20])).kv, expected.kv)
