"""Every recipe: new entries are exact KV only, and stored entries do not change."""

import pytest

import kvweave
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.match import SYSTEM_AND_CHUNKS
from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import remember
from kvweave.types import ChunkKV
from support.contract import close, entries, features, files, plain_logits, prefilled, prepare

PREPARING = [
    name
    for name in (*METHODS, *(f"{preparation}+reuse" for preparation in PREPARATIONS))
    if recipe_named(name).prepare != NotPrepared()
]
CASES = [  # which of the prompt's chunks are prepared, and the ratio
    pytest.param(slice(0), None, id="nothing"),
    pytest.param(slice(1), None, id="the first"),
    pytest.param(slice(1, 2), None, id="the second"),
    pytest.param(slice(1, 2), 1.0, id="the second, everything computed"),
]


@pytest.mark.parametrize("name", METHODS)
class TestEveryRecipe:
    @pytest.mark.parametrize(("prepared", "ratio"), CASES)
    def test_new_kv_equals_full_attention(self, name, prepared, ratio, adapter, prompt):
        store, recipe = MemoryStore(), recipe_named(name)
        prepare(adapter, store, prompt, name, prepared)
        before = entries(adapter, store, prompt)
        result = prefilled(adapter, store, prompt, name, ratio=ratio)
        tokens = result.request.prompt
        whole = adapter.encode(tokens.token_ids).kv
        left = {}
        for entry in result.new_entries:
            if isinstance(entry.content, ChunkKV):
                number = next(
                    n for n, s in enumerate(tokens.spans) if tokens.ids(s) == entry.content.token_ids
                )
                span = tokens.spans[number]
                close(entry.content.kv, whole[:, :, :, span.start : span.end])
                assert entry.provenance == result.request.exact_provenance(number)
                assert entry.provenance.exact
                left[number] = entry
        origins = [span.origin for span in result.plan.spans]
        tainted = ratio != 1 and "reused" in origins
        trusted = origins[: origins.index("reused")] if tainted else origins
        if recipe.match.stored_kinds == SYSTEM_AND_CHUNKS and recipe.attend.causal(result.request, ()):
            fresh = [n for n, origin in enumerate(trusted) if origin == "fresh"]
            assert sorted(left) == [n for n in fresh if tokens.spans[n].kind != "question"]
        # A recipe that reuses only exact KV then still gives full attention.
        assert remember(result) == len(result.new_entries)
        close(prefilled(adapter, store, prompt, "prefix").logits, plain_logits(adapter, prompt))
        assert entries(adapter, store, prompt).keys() - before.keys() == {
            (entry.content.token_ids, entry.provenance) for entry in left.values()
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
        """Requests read the same tensors that the store holds."""
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
def test_stored_entries_do_not_depend_on_the_order_of_preparation(name, adapter, prompt):
    """All KV of every provenance, and all features."""
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
