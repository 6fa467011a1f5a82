"""What chunks lack of what a recipe prepares: what cannot be made is not missed, and the room that the rest takes."""

from dataclasses import replace

import pytest
from contract import shop_of

import kvweave
from kvweave.kvstore.keys import digest_tokens
from kvweave.recipes.context import ChunkList
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import lacking, prepare_chunks

RECORDING = ["weave", "cachecraft"]
"""What records about chunks beside others, of which there may be none."""


@pytest.fixture
def chunks(adapter, prompt):
    return [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]


def named(chunks):
    return [(digest_tokens(ids), len(ids)) for ids in chunks]


def among(ctx, adapter, texts):
    """The same shop with these chunks around."""
    plain = ctx.corpus
    return replace(ctx, corpus=ChunkList([texts], adapter.template.chunk_ids, plain._encode))


class ModelRunner:
    """Counts the model's passes."""

    def __init__(self, adapter, monkeypatch):
        self.number, compute = 0, type(adapter).compute

        def counted(*args, **kwargs):
            self.number += 1
            return compute(*args, **kwargs)

        monkeypatch.setattr(type(adapter), "compute", counted)


@pytest.mark.parametrize("name", RECORDING)
def test_a_note_that_cannot_be_made_is_not_missed_until_other_chunks_come(
    adapter, store, prompt, chunks, name, monkeypatch
):
    recipe, whole = recipe_named(name), shop_of(adapter, store, prompt)
    alone = among(whole, adapter, prompt.chunks[:1])
    assert prepare_chunks(alone, chunks[:1], recipe) == 1
    assert lacking(alone, named(chunks[:1]), recipe) == {}
    passes = ModelRunner(adapter, monkeypatch)
    assert prepare_chunks(alone, chunks[:1], recipe) == 0
    assert passes.number == 0
    assert list(lacking(whole, named(chunks), recipe)) == [0, 1, 2, 3]
    assert prepare_chunks(whole, chunks, recipe) == 4
    assert lacking(whole, named(chunks), recipe) == {}


@pytest.mark.parametrize("name", RECORDING)
def test_chunks_too_long_to_stand_beside_each_other_are_not_looked_at_again(
    adapter, store, prompt, name, monkeypatch
):
    half = 0.6 * adapter.geometry.context_tokens
    words = next(n for n in range(10, 1000, 10) if len(adapter.template.chunk_ids("the inn " * n)) > half)
    texts = [f"{number} {'the inn ' * words}" for number in range(2)]
    chunks = [tuple(adapter.template.chunk_ids(one)) for one in texts]
    assert max(map(len, chunks)) < adapter.geometry.context_tokens < sum(map(len, chunks))
    recipe, ctx = recipe_named(name), among(shop_of(adapter, store, prompt), adapter, texts)
    assert prepare_chunks(ctx, chunks, recipe) == 2
    assert lacking(ctx, named(chunks), recipe) == {}
    # Among others they are looked at again, at the price of no pass, and of the empty notes the last ones stay.
    passes, entries = ModelRunner(adapter, monkeypatch), store.stats().entries
    longer = among(ctx, adapter, [*texts, f"2 {'the inn ' * words}"])
    assert list(lacking(longer, named(chunks), recipe)) == [0, 1]
    assert prepare_chunks(longer, chunks, recipe) == 0
    assert lacking(longer, named(chunks), recipe) == {}
    assert passes.number == 0
    assert store.stats().entries == entries


@pytest.mark.parametrize("name", ["reuse", "following+reuse", "weave", "cachecraft", "qcfuse"])
def test_the_room_that_a_chunk_takes_is_what_the_store_grows_by_at_most(
    adapter, tmp_path, prompt, chunks, name
):
    for recipe in {recipe_named(name, storage=storage) for storage in _storages(name)}:
        with kvweave.ChunkStore(tmp_path / recipe.name) as store:
            ctx = shop_of(adapter, store, prompt)
            ctx.prefix_kv()
            before, asked = store.used_bytes, named(chunks)
            takes = sum(lacking(ctx, asked, recipe).values())
            prepare_chunks(ctx, chunks, recipe)
            assert takes / 2 < store.used_bytes - before + 8192 * store.stats().entries
            assert store.used_bytes - before <= takes


def _storages(name):
    return ["exact"] if name == "cachecraft" else ["exact", "int8", "int4"]


def test_who_lacks_a_note_alone_takes_no_room_for_kv(adapter, store, prompt, chunks):
    ctx = shop_of(adapter, store, prompt)
    weave = recipe_named("weave")
    prepare_chunks(ctx, chunks, replace(weave, select=recipe_named("reuse").select))
    takes = lacking(ctx, named(chunks), weave)
    kv = {number: len(ids) * adapter.geometry.token_bytes for number, ids in enumerate(chunks)}
    assert takes.keys() == kv.keys()
    assert all(takes[number] - 8192 < kv[number] / 4 for number in kv)
    fresh = lacking(among(ctx, adapter, prompt.chunks), named([(1, 2, 3)]), weave)
    assert fresh[0] > 2 * 3 * adapter.geometry.token_bytes  # its own KV, and the isolated one
