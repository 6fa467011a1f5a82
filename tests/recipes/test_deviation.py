"""CacheBlend's and KVShare's scores against their definitions: stale KV beside that of plain full attention."""

import pytest
import torch

import kvweave
from kvweave.ops import scores
from kvweave.recipes.attend import Causal
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.state import PrefillState
from kvweave.testing import tiny_model


def scene_of(adapter, store, prompt, name):
    recipe = recipe_named(name)
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placement = recipe.place.place(request, matched)
    return PrefillState(request, adapter.new_cache(request.prompt.tokens, placement.spans), matched, Causal())


def held(kv_cache, tokens):
    """Keys and values of the second layer, each (G, N, D)."""
    layer = kv_cache.layers[1]
    return layer.keys[0, :, :tokens], layer.values[0, :, :tokens]


def distances(adapter, state):
    """What full attention has in the second layer less what is stored there, of stale rows."""
    ids = state.request.prompt.token_ids
    whole, stored = adapter.new_cache(len(ids)), adapter.new_cache(len(ids), state.kv_cache.spans)
    adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids))))
    adapter.compute(stored, ids, adapter.rows(state.fresh))
    pairs = zip(held(whole, len(ids)), held(stored, len(ids)), strict=True)
    return [(new - stale)[:, state.stale] for new, stale in pairs]


@pytest.mark.parametrize("name", ["cacheblend", "cacheblend-kv", "kvshare"])
def test_scores_are_those_of_the_definition(adapter, store, prompt, name):
    state = scene_of(adapter, store, prompt, name)
    keys, values = distances(adapter, state)
    if name == "cacheblend":
        expected = values.square().sum(dim=(0, 2))
    elif name == "cacheblend-kv":
        expected = keys.square().sum(dim=(0, 2)) + values.square().sum(dim=(0, 2))
    else:
        model = tiny_model()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(torch.tensor([state.request.prompt.token_ids]), output_attentions=True)
        rows = torch.cat([state.stale, state.fresh])  # the others are exact and not computed
        gets = out.attentions[0][0][:, rows].mean(dim=0).sum(dim=0)[state.stale]
        expected = gets * values.abs().sum(dim=(0, 2))
    found = recipe_named(name).select.score.scores(state)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert (found > 0).any()


@pytest.mark.parametrize("name", ["cacheblend", "cacheblend-kv", "cacheblend-gradual"])
def test_comparing_kv_makes_no_attention_weights(adapter, store, prompt, name, monkeypatch):
    kvweave.prepare(adapter, store, prompt.chunks, recipe=name, system=prompt.system)
    monkeypatch.setattr(scores, "masked_logits", lambda *_, **__: pytest.fail("attention weights are made"))
    assert run(
        recipe_named(name), adapter, store, adapter.template.render(prompt), ratio=0.2
    ).selected.numel()
    kvweave.prepare(adapter, store, prompt.chunks, recipe="kvshare", system=prompt.system)
    with pytest.raises(pytest.fail.Exception, match="weights are made"):  # which does need them
        run(recipe_named("kvshare"), adapter, store, adapter.template.render(prompt), ratio=0.2)
