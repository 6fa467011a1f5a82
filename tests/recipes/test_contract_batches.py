"""Every recipe: several requests computed together give what each gives alone."""

from dataclasses import replace

import pytest

import kvweave
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.recipe import Recompute, SelectedRows, run
from support.contract import close, prefilled, prepare

IN_ONE_PASS = [name for name in METHODS if recipe_named(name).recompute == SelectedRows()]


@pytest.fixture
def prompts(prompt):
    """Prompts with different chunks, orders and lengths."""
    first, second, third, fourth = prompt.chunks
    return [
        prompt,
        kvweave.Prompt("Who came?", (fourth, second), system=prompt.system),
        kvweave.Prompt(
            "Where was the road when it rained again?", (second, third, first), system=prompt.system
        ),
    ]


@pytest.fixture
def store():
    return MemoryStore()


class Intercepted(Exception):
    """Carries the pass that a recipe was about to run."""


class Interceptor(Recompute):
    """A recompute slot that runs nothing."""

    def run(self, state, rows, hooks, *, capture):
        raise Intercepted((state.kv_cache, state.request.prompt.token_ids, state.plan(rows)))


def held(recipe, adapter, store, prompt):
    with pytest.raises(Intercepted) as found:
        run(replace(recipe, recompute=Interceptor()), adapter, store, adapter.template.render(prompt))
    return found.value.args[0]


def held_keys(kv_cache):
    return kv_cache.layers[-1].keys[:, :, : kv_cache.get_seq_length()]


@pytest.mark.parametrize("name", METHODS)
def test_answers_decoded_together_equal_those_decoded_alone(name, adapter, store, prompt, prompts):
    prepare(adapter, store, prompt, name)

    def answers(asked):
        starts = []
        for each in asked:
            result = prefilled(adapter, store, each, name)
            starts.append((result.kv_cache, result.request.prompt.token_ids, result.logits))
        tokens = [[int(logits.argmax())] for *_, logits in starts]
        for _ in range(5):
            steps = [(kv_cache, own[-1]) for (kv_cache, *_), own in zip(starts, tokens, strict=True)]
            for own, logits in zip(tokens, adapter.step_packed(steps), strict=True):
                own.append(int(logits.argmax()))
        return tokens, [held_keys(kv_cache) for kv_cache, *_ in starts]

    together, keys = answers(prompts)
    for number, each in enumerate(prompts):
        (alone,), (own,) = answers([each])
        assert together[number] == alone
        close(keys[number], own)


@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_rows_of_a_packed_pass_equal_those_computed_alone(name, adapter, store, prompt, prompts):
    recipe = recipe_named(name)
    prepare(adapter, store, prompt, name)
    together = adapter.compute_packed([held(recipe, adapter, store, each) for each in prompts])
    for logits, each in zip(together, prompts, strict=True):
        close(logits, prefilled(adapter, store, each, name).logits)
