"""Budgets, errors, and a recipe from outside the package."""

import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvweave
from kvweave.errors import InvalidRequest, ModelError, PromptTooLong, UnknownRecipe
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Budget
from kvweave.testing import tiny_adapter


@dataclass(frozen=True)
class EveryOther:
    """A selector from outside the package: every other stale row up to the budget."""

    selective = True
    extractors = ()

    def choose(self, state):
        return state.stale[::2][: state.request.budget.max_rows(state.stale.numel())]


def test_a_new_method_needs_no_change_elsewhere(adapter, store, prompt):
    recipe = Recipe("every-other", select=EveryOther(), ratio=0.3)
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    result = kvweave.prefill(adapter, store, prompt, recipe=recipe)
    stale = sum(s.tokens for s in result.plan.spans if s.origin == "reused")
    assert result.plan.recomputed_tokens == result.selected.numel() == Budget(0.3).max_rows(stale) > 0
    assert result.selected.tolist() == sorted(result.selected.tolist())
    none = kvweave.prefill(adapter, store, prompt, recipe=recipe, ratio=0.0)
    assert not torch.equal(result.logits, none.logits)


@pytest.mark.parametrize("storage", ["exact", "int8"])
def test_a_model_that_gives_nan_is_an_error_and_stores_nothing(storage, tmp_path):
    adapter = tiny_adapter()
    adapter.model.get_input_embeddings().weight.data[adapter.tokenizer("~")["input_ids"]] = torch.nan
    sound, bad = kvweave.Prompt("?", ("sound",)), kvweave.Prompt("?", ("b~d",))
    with kvweave.ChunkStore(tmp_path) as store:
        with pytest.raises(InvalidRequest, match="NaN"):
            kvweave.prepare(adapter, store, bad.chunks, recipe="reuse", storage=storage)
        both = (*bad.chunks, *sound.chunks)
        assert kvweave.prepare(adapter, store, both, recipe="reuse", storage=storage) == 1
        entries = store.stats().entries
        with pytest.raises(ModelError, match="gives NaN for this text, so there is no answer"):
            kvweave.prefill(adapter, store, bad, recipe="reuse")
        assert store.stats().entries == entries
        result = kvweave.prefill(adapter, store, sound, recipe="reuse", storage=storage)
        assert result.plan.reused_tokens + result.plan.exact_tokens > 0


def test_nan_while_decoding_is_an_error(adapter, store):
    result = kvweave.prefill(adapter, store, kvweave.Prompt("?", ("sound",)))
    result.logits[:] = torch.nan
    with pytest.raises(ModelError, match="gives NaN"):
        kvweave.generate(result)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_a_budget_never_exceeds_the_stale_tokens(ratio, stale):
    assert 0 <= Budget(ratio).max_rows(stale) <= stale


@pytest.mark.parametrize(
    ("ratio", "stale", "rows"), [(0.07, 100, 7), (0.14, 50, 7), (0.28, 25, 7), (0.1, 11, 2), (0, 5, 0)]
)
def test_a_budget_rounds_up_and_not_beyond(ratio, stale, rows):
    assert Budget(ratio).max_rows(stale) == rows


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_an_impossible_ratio_is_refused(adapter, store, prompt, ratio):
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        kvweave.prefill(adapter, store, prompt, ratio=ratio)


def test_a_ratio_that_cannot_be_spent_is_refused(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, system=prompt.system)
    with pytest.raises(InvalidRequest, match="recomputes nothing"):
        kvweave.prefill(adapter, store, prompt, recipe="reuse", ratio=0.5)


def test_an_unknown_recipe_lists_the_known_ones(adapter, store, prompt):
    with pytest.raises(UnknownRecipe, match="full, reuse, prefix"):
        kvweave.prefill(adapter, store, prompt, recipe="fastest")


def test_preparation_and_storage_are_arguments_or_part_of_the_name(adapter, store, prompt):
    kvweave.prepare(
        adapter, store, prompt.chunks, recipe="reuse", prepare="bare", storage="int8", system=prompt.system
    )
    result = kvweave.prefill(adapter, store, prompt, recipe="reuse", prepare="bare", storage="int8")
    named = kvweave.prefill(adapter, store, prompt, recipe="bare-int8+reuse")
    assert result.plan.recipe == named.plan.recipe == "bare-int8+reuse"
    assert result.plan.reused_tokens == named.plan.reused_tokens > 0
    torch.testing.assert_close(result.logits, named.logits)
    for other in ({"prepare": "bare"}, {"storage": "int8"}):
        with pytest.raises(InvalidRequest, match="has its own preparation"):
            kvweave.prefill(adapter, store, prompt, recipe=Recipe("mine"), **other)


@pytest.mark.parametrize("recipe", ["full", "reuse", "weave", "cachecraft"])
def test_five_functions_lead_from_run_to_the_model(recipe, adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, recipe="reuse", system=prompt.system)
    stacks = []

    def record_stack(module, args, kwargs):
        frame, names = sys._getframe(), []
        while frame.f_code is not run.__code__:
            frame = frame.f_back
            if frame.f_globals["__name__"].startswith("kvweave."):
                names.append(frame.f_code.co_qualname)
        stacks.append(names[::-1])

    hook = adapter.model.register_forward_pre_hook(record_stack, with_kwargs=True)
    run(recipe_named(recipe), adapter, store, adapter.template.render(prompt))
    hook.remove()
    assert stacks[-1] == [
        "run",
        "SelectedRows.run",
        "Adapter.compute",
        "Adapter.call_model",
    ]


def test_the_error_for_a_prompt_beyond_the_context_names_the_excess(adapter, store):
    long = kvweave.Prompt("Why?", ("x" * 600,))
    tokens = adapter.template.render(long).tokens
    with pytest.raises(PromptTooLong, match=f"{tokens - 512} more than the 512"):
        kvweave.prefill(adapter, store, long)


def test_chunks_given_as_one_string_are_an_error(adapter, store):
    with pytest.raises(TypeError, match="one string"):
        kvweave.Prompt("Why?", "the text")
    with pytest.raises(TypeError, match="one string"):
        kvweave.prepare(adapter, store, "the text")


def test_equal_chunks_are_prepared_once(adapter, store):
    assert kvweave.prepare(adapter, store, ["the inn", "the inn", "the road"]) == 2


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope"])
def test_kv_of_another_frequency_regime_never_counts_as_exact(family, tmp_path):
    """Short and long prompts run under different frequencies, so they share no system prefix and no first chunk."""
    adapter = tiny_adapter(family)
    short = kvweave.Prompt("a?", ("the inn",), system="S.")
    long = kvweave.Prompt("a?", ("the inn", "x" * 120), system="S.")
    with kvweave.ChunkStore(tmp_path) as store:
        kvweave.prefill(adapter, store, short, recipe="prefix")
        result = kvweave.prefill(adapter, store, long, recipe="prefix")
        assert result.plan.exact_tokens == 0
        ids = torch.tensor([adapter.template.render(long).token_ids])
        adapter.rotation.reset_lengths()
        with torch.no_grad():
            plain = adapter.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        torch.testing.assert_close(result.logits, plain, atol=1e-4, rtol=1e-4)
