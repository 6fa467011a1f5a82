"""Which chunks lack KV or features of a recipe, without those that cannot be computed, and how many bytes these take."""

from dataclasses import replace

import pytest

import kvweave
from kvweave.kvstore.keys import digest_tokens
from kvweave.recipes.context import ChunkList
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from support.contract import ctx_of

WITH_NEIGHBOURS = ["weave", "cachecraft"]
"""Recipes whose features need other chunks, of which there may be none."""


@pytest.fixture
def chunks(adapter, prompt):
    return [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]


def named(chunks):
    return [(digest_tokens(ids), len(ids)) for ids in chunks]


def among(ctx, adapter, texts):
    """The same context with these chunks as corpus."""
    plain = ctx.corpus
    return replace(ctx, corpus=ChunkList([texts], adapter.template.chunk_ids, plain._embed))


class PassCounter:
    """Counts the model's passes."""

    def __init__(self, adapter, monkeypatch):
        self.number, compute = 0, type(adapter).compute

        def counted(*args, **kwargs):
            self.number += 1
            return compute(*args, **kwargs)

        monkeypatch.setattr(type(adapter), "compute", counted)


@pytest.mark.parametrize("name", WITH_NEIGHBOURS)
def test_a_feature_that_cannot_be_computed_is_not_missing_until_other_chunks_come(
    adapter, store, prompt, chunks, name, monkeypatch
):
    recipe, whole = recipe_named(name), ctx_of(adapter, store, prompt)
    alone = among(whole, adapter, prompt.chunks[:1])
    assert prepare_chunks(alone, chunks[:1], recipe) == 1
    assert missing_bytes(alone, named(chunks[:1]), recipe) == {}
    passes = PassCounter(adapter, monkeypatch)
    assert prepare_chunks(alone, chunks[:1], recipe) == 0
    assert passes.number == 0
    assert list(missing_bytes(whole, named(chunks), recipe)) == [0, 1, 2, 3]
    assert prepare_chunks(whole, chunks, recipe) == 4
    assert missing_bytes(whole, named(chunks), recipe) == {}


@pytest.mark.parametrize("name", WITH_NEIGHBOURS)
def test_chunks_too_long_for_one_context_are_not_tried_again(adapter, store, prompt, name, monkeypatch):
    half = 0.6 * adapter.geometry.context_tokens
    words = next(n for n in range(10, 1000, 10) if len(adapter.template.chunk_ids("the inn " * n)) > half)
    texts = [f"{number} {'the inn ' * words}" for number in range(2)]
    chunks = [tuple(adapter.template.chunk_ids(one)) for one in texts]
    assert max(map(len, chunks)) < adapter.geometry.context_tokens < sum(map(len, chunks))
    recipe, ctx = recipe_named(name), among(ctx_of(adapter, store, prompt), adapter, texts)
    assert prepare_chunks(ctx, chunks, recipe) == 2
    assert missing_bytes(ctx, named(chunks), recipe) == {}
    # With another corpus they are tried again, without a pass, and only the last placeholders stay.
    passes, entries = PassCounter(adapter, monkeypatch), store.stats().entries
    longer = among(ctx, adapter, [*texts, f"2 {'the inn ' * words}"])
    assert list(missing_bytes(longer, named(chunks), recipe)) == [0, 1]
    assert prepare_chunks(longer, chunks, recipe) == 0
    assert missing_bytes(longer, named(chunks), recipe) == {}
    assert passes.number == 0
    assert store.stats().entries == entries


@pytest.mark.parametrize("name", ["reuse", "following+reuse", "woven+reuse", "weave", "cachecraft", "qcfuse"])
def test_missing_bytes_bound_the_growth_of_the_store(adapter, tmp_path, prompt, chunks, name):
    for recipe in {recipe_named(name, storage=storage) for storage in _storages(name)}:
        with kvweave.ChunkStore(tmp_path / recipe.name) as store:
            ctx = ctx_of(adapter, store, prompt)
            ctx.prefix_kv()
            before, asked = store.used_bytes, named(chunks)
            missing = sum(missing_bytes(ctx, asked, recipe).values())
            prepare_chunks(ctx, chunks, recipe)
            assert missing / 2 < store.used_bytes - before + 8192 * store.stats().entries
            assert store.used_bytes - before <= missing


def _storages(name):
    return ["exact"] if name == "cachecraft" else ["exact", "int8", "int4"]


def test_a_missing_feature_alone_counts_no_kv(adapter, store, prompt, chunks):
    ctx = ctx_of(adapter, store, prompt)
    weave = recipe_named("weave", "following")  # which does not measure it on the way
    prepare_chunks(ctx, chunks, replace(weave, select=recipe_named("reuse").select))
    missing = missing_bytes(ctx, named(chunks), weave)
    kv = {number: len(ids) * adapter.geometry.token_bytes for number, ids in enumerate(chunks)}
    assert missing.keys() == kv.keys()
    assert all(missing[number] - 8192 < kv[number] / 4 for number in kv)
    fresh = missing_bytes(among(ctx, adapter, prompt.chunks), named([(1, 2, 3)]), weave)
    assert fresh[0] > 2 * 3 * adapter.geometry.token_bytes  # its own KV, and the isolated one
