"""Recipes on models with sliding windows, soft caps and frequencies that depend on the length."""

import math
from dataclasses import replace

import pytest

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV
from support.contract import SELECTING, Counted, close, plain_logits, prefilled, prepare, stale_rows

# One that only reuses, one that runs the question, one that leaves early, one that looks at all rows' attention, one
# with versions, one that reads digests.
NAMES = ("reuse", "prophetkv", "cacheblend-gradual", "kvshare", "cachecraft", "qcfuse")


@pytest.fixture(scope="module", params=["mistral-sliding", "gemma2", "phi3-longrope"])
def adapter(request):
    """Windows of 16 tokens in all layers, or in some with a soft cap; long frequencies from 64 tokens on."""
    return tiny_adapter(request.param)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.mark.parametrize("name", METHODS)
def test_ratio_one_equals_full_attention(name, adapter, store, prompt):
    prepare(adapter, store, prompt, name)
    close(prefilled(adapter, store, prompt, name, ratio=1.0).logits, plain_logits(adapter, prompt))


@pytest.mark.parametrize("name", NAMES)
class TestRecipes:
    def test_a_cold_store_gives_full_attention_and_exact_entries(self, name, adapter, store, prompt):
        result = prefilled(adapter, store, prompt, name)
        close(result.logits, plain_logits(adapter, prompt))
        tokens = result.request.prompt
        whole = adapter.encode(tokens.token_ids).kv
        entries = [entry for entry in result.new_entries if isinstance(entry.content, ChunkKV)]
        for entry, span in zip(entries, tokens.spans[:-1], strict=True):
            close(entry.content.kv, whole[:, :, :, span.start : span.end])

    def test_stale_kv_is_used(self, name, adapter, store, prompt):
        """Even if it does not reach the last row, whose windows may hold nothing stale."""
        prepare(adapter, store, prompt, name)
        result = prefilled(adapter, store, prompt, name, ratio=0.0)
        stale, tokens = stale_rows(result), result.request.prompt
        assert stale
        whole = adapter.encode(tokens.token_ids).kv[-1, 1]  # (G, N, D)
        held = result.kv_cache.layers[-1].values[0, :, : tokens.tokens]
        assert not held[:, stale].isclose(whole[:, stale], atol=1e-2).all()


@pytest.mark.parametrize("name", SELECTING)
def test_a_selection_is_stale_and_within_budget(name, adapter, store, prompt):
    recipe = recipe_named(name)
    prepare(adapter, store, prompt, name)
    counted = Counted(recipe.recompute)
    tokens = adapter.template.render(prompt)
    result = run(replace(recipe, recompute=counted), adapter, store, tokens, ratio=0.3)
    stale = set(stale_rows(result))
    assert len(result.selected) <= math.ceil(0.3 * len(stale))
    assert (
        len(result.selected) or name == "cacheclip-windows"
    )  # its windows may drop all that a small budget selects
    assert set(result.selected.tolist()) <= stale
    assert (
        sum(len(stale & set(rows)) for rows in counted.rows) == len(result.selected) * adapter.geometry.layers
    )
