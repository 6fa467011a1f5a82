"""CacheBlend's gradual variant against its definition, step by step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_tokenizer
from kvweave_lab.recipes.cacheblend import rows_per_layer
from kvweave_lab.recipes.row_schedule import scheduled


def deep_adapter(layers: int) -> Adapter:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return Adapter(LlamaForCausalLM(config), tiny_tokenizer())


class Fixed:
    """Schedules given rows, and records how far values are off in one layer."""

    def __init__(self, rows: list[torch.Tensor], layer: int = 0, stale=()) -> None:
        self.rows, self.layer, self.stale, self.off = rows, layer, stale, {}

    def rows_for(self, layer):
        return self.rows[min(layer, len(self.rows) - 1)]

    def on_layer(self, queries):
        if queries.layer == self.layer:
            off = (queries.values - self.stale[self.layer].values[:, :, : queries.values.shape[2]])[0]
            off = off[:, queries.rows].square().sum(dim=(0, 2))
            self.off = dict(zip(queries.rows.tolist(), off.tolist(), strict=True))


def worst(off: dict[int, float], among: list[int], count: int) -> list[int]:
    return sorted(sorted(among, key=lambda row: -off[row])[:count])


@given(st.integers(2, 40), st.integers(1, 300), st.data())
def test_the_schedule_falls_and_has_the_budget_as_its_mean(layers, stale, data):
    count = data.draw(st.integers(1, stale))
    counts = rows_per_layer(count, stale, layers)
    assert sum(counts) == layers * count
    assert counts == sorted(counts, reverse=True)
    assert 1 <= counts[-1] <= counts[0] <= stale
    assert counts[0] - count == min(count, 2 * (stale - count)) // 2


def test_each_layer_keeps_the_rows_furthest_off_in_the_layer_before(prompt, tmp_path):
    adapter, recipe = deep_adapter(5), recipe_named("cacheblend-gradual")
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
        tokens = adapter.template.render(prompt)
        result = run(recipe, adapter, store, tokens, ratio=0.3)
        stale = [i for s in result.plan.spans if s.origin == "reused" for i in range(s.start, s.end)]
        fresh = list(range(tokens.spans[-1].start, tokens.tokens))

        def kv_cache():
            return run(recipe, adapter, store, tokens, ratio=0.0).kv_cache

        def compute(fixed, *hooks):
            cache, plan = kv_cache(), adapter.rows(fixed.rows[0])
            plan.hooks.extend(hooks)
            return adapter.compute(cache, tokens.token_ids, scheduled(plan, cache, fixed))

        # After a full first layer the second layer's values are those of full attention.
        full = adapter.encode(tokens.token_ids).kv[1, 1]
        held = kv_cache().layers[1].values[0, :, : tokens.tokens]
        off = (full - held).square().sum(dim=(0, 2)).tolist()
        counts = rows_per_layer(result.selected.numel(), len(stale), 5)
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4]
        rows = [worst(off, stale, counts[0])]
        rows.append(worst(off, rows[0], counts[1]))
        for layer in range(1, 4):
            fixed = Fixed([torch.tensor([*part, *fresh]) for part in rows], layer, kv_cache().layers)
            compute(fixed, fixed)
            rows.append(worst(fixed.off, rows[-1], counts[layer + 1]))
        fixed = Fixed([torch.tensor([*part, *fresh]) for part in rows])
        expected = compute(fixed)
    torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=1e-4)
    assert result.selected.tolist() == worst(off, stale, result.selected.numel())


def test_a_model_of_one_layer_is_refused(prompt, tmp_path):
    adapter = deep_adapter(1)
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prepare(adapter, store, prompt.chunks, system=prompt.system)
        with pytest.raises(InvalidRequest, match="has one layer"):
            kvweave.prefill(adapter, store, prompt, recipe="cacheblend-gradual", ratio=0.3)
