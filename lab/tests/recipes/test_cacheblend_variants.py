"""CacheBlend's variants compare stored KV with full attention's, without attention weights."""

import pytest
import torch

from kvweave.ops import scores
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from support.contract import prepare, second_layer_distances, state_of


def test_scores_with_keys_are_those_of_the_definition(adapter, store, prompt):
    prepare(adapter, store, prompt, "cacheblend-kv")
    state = state_of(adapter, store, prompt, "cacheblend-kv")
    keys, values = second_layer_distances(adapter, state)
    expected = keys.square().sum(dim=(0, 2)) + values.square().sum(dim=(0, 2))
    found = recipe_named("cacheblend-kv").select.score.scores(state)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert (found > 0).any()


@pytest.mark.parametrize("name", ["cacheblend-kv", "cacheblend-gradual"])
def test_comparing_kv_computes_no_attention_weights(adapter, store, prompt, name, monkeypatch):
    prepare(adapter, store, prompt, name)
    monkeypatch.setattr(
        scores, "masked_logits", lambda *_, **__: pytest.fail("attention weights are computed")
    )
    tokens = adapter.template.render(prompt)
    assert run(recipe_named(name), adapter, store, tokens, ratio=0.2).selected.numel()
