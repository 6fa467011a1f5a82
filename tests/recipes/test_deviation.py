"""CacheBlend's and KVShare's scores against their definitions: stale KV beside that of plain full attention."""

import pytest
import torch

import kvweave
from kvweave.ops import scores
from kvweave.recipes.assembled import Assembled
from kvweave.recipes.attend import Causal
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.recipes.state import Budget, PrefillRequest
from kvweave.testing import tiny_model


def scene_of(adapter, store, prompt, name):
    recipe = recipe_named(name)
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placement = recipe.place.place(request, matched)
    return Assembled(request, adapter.canvas(request.prompt.tokens, placement.spans), matched, Causal())


def held(canvas, tokens):
    """Keys and values of the second layer, each (G, N, D)."""
    layer = canvas.layers[1]
    return layer.keys[0, :, :tokens], layer.values[0, :, :tokens]


def distances(adapter, scene):
    """What full attention has in the second layer less what is stored there, of stale rows."""
    ids = scene.request.prompt.token_ids
    whole, stored = adapter.canvas(len(ids)), adapter.canvas(len(ids), scene.canvas.spans)
    adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids))))
    adapter.compute(stored, ids, adapter.rows(scene.fresh))
    pairs = zip(held(whole, len(ids)), held(stored, len(ids)), strict=True)
    return [(new - stale)[:, scene.stale] for new, stale in pairs]


@pytest.mark.parametrize("name", ["cacheblend", "cacheblend-kv", "kvshare"])
def test_scores_are_those_of_the_definition(adapter, store, prompt, name):
    scene = scene_of(adapter, store, prompt, name)
    keys, values = distances(adapter, scene)
    if name == "cacheblend":
        expected = values.square().sum(dim=(0, 2))
    elif name == "cacheblend-kv":
        expected = keys.square().sum(dim=(0, 2)) + values.square().sum(dim=(0, 2))
    else:
        model = tiny_model()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(torch.tensor([scene.request.prompt.token_ids]), output_attentions=True)
        rows = torch.cat([scene.stale, scene.fresh])  # the others are exact and not computed
        gets = out.attentions[0][0][:, rows].mean(dim=0).sum(dim=0)[scene.stale]
        expected = gets * values.abs().sum(dim=(0, 2))
    found = recipe_named(name).select.score.scores(scene)
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
