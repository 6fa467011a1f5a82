"""Every recipe: only exact KV is remembered, and stored entries stay as they are."""

import pytest
from contract import close, entries, features, files, plain_logits, prefilled, prepare

import kvweave
from kvweave.kvstore.keys import with_queries
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.match import PATHS
from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import remember
from kvweave.types import ChunkKV

PREPARING = [
    name
    for name in (*METHODS, *(f"{preparation}+reuse" for preparation in PREPARATIONS))
    if recipe_named(name).prepare != NotPrepared()
]
CASES = [  # what is prepared of the prompt's chunks, and the ratio
    pytest.param(slice(0), None, id="nothing"),
    pytest.param(slice(1), None, id="the first"),
    pytest.param(slice(1, 2), None, id="the second"),
    pytest.param(slice(1, 2), 1.0, id="the second, everything computed"),
]


@pytest.mark.parametrize("name", METHODS)
class TestEveryRecipe:
    @pytest.mark.parametrize(("prepared", "ratio"), CASES)
    def test_what_is_remembered_is_what_full_attention_computes(self, name, prepared, ratio, adapter, prompt):
        store, recipe = MemoryStore(), recipe_named(name)
        prepare(adapter, store, prompt, name, prepared)
        before = entries(adapter, store, prompt)
        result = prefilled(adapter, store, prompt, name, ratio=ratio)
        tokens = result.request.prompt
        whole = adapter.encode(tokens.token_ids).kv
        left = {}
        for kept in result.remembered:
            if isinstance(kept.content, ChunkKV):
                number = next(
                    n for n, s in enumerate(tokens.spans) if tokens.ids(s) == kept.content.token_ids
                )
                span = tokens.spans[number]
                close(kept.content.kv, whole[:, :, :, span.start : span.end])
                exact = result.request.exact_provenance(number)
                assert kept.provenance == (exact if kept.content.queries is None else with_queries(exact))
                assert kept.provenance.exact
                left[number] = kept
        origins = [span.origin for span in result.plan.spans]
        tainted = ratio != 1 and "reused" in origins
        trusted = origins[: origins.index("reused")] if tainted else origins
        if recipe.match.remembers == PATHS and recipe.attend.causal(result.request, ()):
            fresh = [n for n, origin in enumerate(trusted) if origin == "fresh"]
            assert sorted(left) == [n for n in fresh if tokens.spans[n].kind != "question"]
        # Whoever takes nothing but exact paths then gets full attention, whatever was stored in between.
        assert remember(result) == len(result.remembered)
        close(prefilled(adapter, store, prompt, "prefix").logits, plain_logits(adapter, prompt))
        assert entries(adapter, store, prompt).keys() - before.keys() == {
            (kept.content.token_ids, kept.provenance) for kept in left.values()
        }

    def test_no_stored_entry_changes_on_disk(self, name, adapter, store, prompt):
        prepare(adapter, store, prompt, name)
        kvweave.prefill(adapter, store, prompt, recipe=name)
        prepare(adapter, store, prompt, "reuse")
        before = files(store)
        assert before
        self.answer(adapter, store, prompt, name)
        after = files(store)
        assert {file: after[file] for file in before} == before

    def test_no_stored_entry_changes_in_memory(self, name, adapter, prompt):
        """Requests read the very tensors that the store holds."""
        store, recipe = MemoryStore(), recipe_named(name)
        prepare(adapter, store, prompt, name)
        kvweave.prefill(adapter, store, prompt, recipe=name)
        prepare(adapter, store, prompt, "reuse")
        held = {**entries(adapter, store, prompt), **features(adapter, store, prompt, recipe)}
        before = {place: tensor.clone() for place, tensor in held.items()}
        assert before
        self.answer(adapter, store, prompt, name)
        again = {**entries(adapter, store, prompt), **features(adapter, store, prompt, recipe)}
        for place, tensor in before.items():
            assert again[place] is held[place]
            assert held[place].equal(tensor)

    @staticmethod
    def answer(adapter, store, prompt, name):
        for ratio in (None, 1.0):
            result = kvweave.prefill(adapter, store, prompt, recipe=name, ratio=ratio)
            adapter.model.generate(
                **result.generate_kwargs, max_new_tokens=3, do_sample=False, pad_token_id=0
            )


@pytest.mark.parametrize("name", PREPARING)
def test_what_is_stored_does_not_depend_on_the_order_of_preparation(name, adapter, prompt):
    """All KV of every making, and all notes about it."""
    recipe = recipe_named(name)
    backwards = kvweave.Prompt(prompt.question, prompt.chunks[::-1], system=prompt.system)
    contents = []
    for order in (slice(None), slice(None, None, -1)):
        store = MemoryStore()
        done = prepare(adapter, store, prompt, recipe, order)
        assert done == len(prompt.chunks)
        contents.append({**entries(adapter, store, prompt), **features(adapter, store, backwards, recipe)})
    first, second = contents
    assert first
    assert first.keys() == second.keys()
    assert all(tensor.equal(second[place]) for place, tensor in first.items())
    extractors = (*recipe.prepare.extractors, *recipe.select.extractors)
    assert len([place for place in first if len(place) == 3]) >= len(extractors) * len(prompt.chunks)
