"""CacheBlend's and KVShare's scores against their definitions: stale KV and that of plain full attention."""

import pytest
import torch

import kvweave
from kvweave.ops import scores
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_model
from support.contract import second_layer_distances, state_of


@pytest.mark.parametrize("name", ["cacheblend", "kvshare"])
def test_scores_are_those_of_the_definition(adapter, store, prompt, name):
    kvweave.prepare(adapter, store, prompt.chunks, recipe=name, system=prompt.system)
    state = state_of(adapter, store, prompt, name)
    _, values = second_layer_distances(adapter, state)
    if name == "cacheblend":
        expected = values.square().sum(dim=(0, 2))
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


def test_comparing_kv_leaves_the_stale_kv_of_the_second_layer(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheblend", system=prompt.system)
    state = state_of(adapter, store, prompt, "cacheblend")
    like = torch.empty(1, adapter.geometry.kv_heads, 0, adapter.geometry.head_width)
    before = [each[:, :, state.stale].clone() for each in state.kv_cache.layer_kv(1, like)]
    first, again = state.compare_second_layer(), state.compare_second_layer()
    for held, stale in zip(state.kv_cache.layer_kv(1, like), before, strict=True):
        assert torch.equal(held[:, :, state.stale], stale)
    assert torch.equal(first.values, again.values)
    assert first.values.any()


def test_comparing_kv_computes_no_attention_weights(adapter, store, prompt, monkeypatch):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="cacheblend", system=prompt.system)
    monkeypatch.setattr(
        scores, "masked_logits", lambda *_, **__: pytest.fail("attention weights are computed")
    )
    assert run(
        recipe_named("cacheblend"), adapter, store, adapter.template.render(prompt), ratio=0.2
    ).selected.numel()
    kvweave.prepare(adapter, store, prompt.chunks, recipe="kvshare", system=prompt.system)
    with pytest.raises(pytest.fail.Exception, match="weights are computed"):  # which does need them
        run(recipe_named("kvshare"), adapter, store, adapter.template.render(prompt), ratio=0.2)
