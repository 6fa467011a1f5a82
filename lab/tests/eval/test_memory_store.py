"""What an evaluation keeps in memory serves recipes as a store on disk does."""

import pytest
import torch

import kvweave
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.recipe import run
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance
from kvweave_lab.eval.preparation import prepare_sample
from kvweave_lab.eval.samples import Sample

BARE = KVProvenance("bare", ())
BEHIND = KVProvenance("isolated", (digest_tokens([9]),))
OBSERVED = KVProvenance("observed", BEHIND.context)  # another name for the same pass
PROMPT = kvweave.Prompt(
    "Where is the inn?", ("The inn is in the north.", "There is rain.", "The road leads on.")
)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


def entry(number):
    return ChunkKV((number, 2), torch.full((1, 2, 1, 2, 4), float(number)))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_it_looks_up_as_a_store_on_disk_does(kind, adapter, tmp_path):
    model = adapter.fingerprint
    with MemoryStore() if kind == "memory" else kvweave.ChunkStore(tmp_path) as store:
        for provenance, value in ((BARE, 1.0), (BEHIND, 2.0), (BARE, 3.0)):  # the third comes too late
            assert store.put(model, ChunkKV((1, 2), torch.full((1, 2, 1, 2, 4), value)), provenance, ())
        assert store.has_many(model, [(digest_tokens([1, 2]), BARE), (digest_tokens([1]), BARE)]) == [
            True,
            False,
        ]
        assert store.get(model, (1,), BARE) is None
        assert store.get(tiny_adapter("qwen3").fingerprint, (1, 2), BARE) is None
        found = store.find(
            model, [((1, 2), [OBSERVED, BARE]), ((1, 2), [BARE, BEHIND]), ((1, 2), []), ((), [BARE])]
        )
    assert [one and (float(one[0].kv.mean()), one[0].token_ids) for one in found] == [
        *((2.0, (1, 2)), (1.0, (1, 2)), None, None)
    ]
    assert found[0][1] is OBSERVED


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_it_stores_features_as_a_store_on_disk_does(kind, adapter, tmp_path):
    model = adapter.fingerprint
    notes = [ChunkFeature((1, 2), {"moved": torch.tensor([value])}) for value in (1.0, 2.0)]
    with MemoryStore() if kind == "memory" else kvweave.ChunkStore(tmp_path) as store:
        assert all(store.put(model, note, BARE, ()) for note in notes)  # the second comes too late
        assert store.get(model, (1, 2), BARE) is None
        store.put(model, entry(1), BEHIND, ())
        wanted = [((1, 2), BARE), ((1, 2), OBSERVED), ((1,), BARE)]
        found = store.find_features(model, wanted)
        asked = [(digest_tokens(ids), provenance) for ids, provenance in wanted]
        assert store.has_many(model, asked, "note") == [True, False, False]
    assert [note and float(note.tensors["moved"]) for note in found] == [1.0, None, None]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_it_lists_and_limits_versions_as_a_store_on_disk_does(kind, adapter, tmp_path):
    model = adapter.fingerprint
    paths = [KVProvenance("observed", (letter * 32,)) for letter in "abcd"]
    similar = KVProvenance("similar-10", (), exact=False)
    with MemoryStore() if kind == "memory" else kvweave.ChunkStore(tmp_path) as store:
        for provenance in (*paths[:3], similar, paths[0]):  # the last is there already
            assert store.put(model, entry(1), provenance, ())
        store.put(model, entry(3), paths[3], ())
        assert store.versions(model, [(3, 2), (5, 2), (1, 2)]) == [
            [paths[3]],
            [],
            [similar, *reversed(paths[:3])],
        ]
        store.put(model, entry(1), paths[3], (), max_versions=2)
        assert store.versions(model, [(1, 2)]) == [[paths[3], similar, paths[2]]]
        assert store.get(model, (1, 2), paths[0]) is None


def test_what_comes_later_stays_apart(adapter):
    model = adapter.fingerprint
    first = MemoryStore()
    first.put(model, entry(1), BARE, ())
    second = MemoryStore(first)
    second.put(model, entry(2), BARE, ())
    held = [
        [store.get(model, (number, 2), BARE) is not None for number in (1, 2)] for store in (first, second)
    ]
    assert held == [[True, False], [True, True]]


@pytest.mark.parametrize("name", [*METHODS, "isolated-int8+prophetkv", "similar-int4+cacheblend"])
def test_every_recipe_computes_the_same_from_it(name, adapter, tmp_path):
    """Only what recipes ask of a store today is there; a recipe that asks for more fails here."""
    recipe, prompt = recipe_named(name), adapter.template.render(PROMPT)
    ratio = 0.3 if recipe.select.selective else 0.0
    sample = Sample("here/0", "here", PROMPT.chunks, PROMPT.question, (), "f1", 4)
    results = []
    with kvweave.ChunkStore(tmp_path) as disk:
        for store in (disk, MemoryStore()):
            prepare_sample(adapter, store, sample, prompt, recipe)
            results.append(run(recipe, adapter, store, prompt, ratio=ratio))
    on_disk, in_memory = results
    assert torch.equal(on_disk.logits, in_memory.logits)
    assert on_disk.plan == in_memory.plan
