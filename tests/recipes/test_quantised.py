"""Chunk KV stored in fewer bits: how recipes use it, and that it never counts as exact."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvweave.errors import InvalidRequest, UnknownRecipe
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import storage_of
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.ops.quantise import quantise
from kvweave.recipes.context import ChunkList, PrepareContext, Vectors
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.methods.weave import ContextSensitivity
from kvweave.recipes.offline import missing_bytes, prepare_chunks
from kvweave.recipes.prepare import Isolated, NotPrepared
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV, KVProvenance, Prompt, Storage

TEXTS = ("The bell rings at nine.", "The gate opens at ten.", "The boat leaves at noon.")
PROMPT = Prompt("When does the boat leave?", TEXTS)
STORAGES: list[Storage] = ["int8", "int4"]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return tiny_adapter()


def ctx_of(adapter: Adapter, store: ChunkStore) -> PrepareContext:
    def vectors(texts: Sequence[str]) -> Vectors:
        return torch.tensor([[len(text), 1.0] for text in texts]).numpy()

    corpus = ChunkList([TEXTS], adapter.template.chunk_ids, vectors)
    return PrepareContext(adapter, store, adapter.template.prefix_ids(None), corpus)


def prepare(adapter: Adapter, store: ChunkStore, recipe: Recipe) -> int:
    return prepare_chunks(ctx_of(adapter, store), map(adapter.template.chunk_ids, TEXTS), recipe)


def placed(adapter: Adapter, store: ChunkStore, name: str) -> list[tuple[ChunkKV, KVProvenance]]:
    """Return the KV that a recipe uses for each chunk of the prompt."""
    result = run(recipe_named(name), adapter, store, adapter.template.render(PROMPT))
    found = recipe_named(name).match.find(result.request, recipe_named(name).prepare)
    return [
        (one.kv, one.provenance) for one in found[1:-1] if one.kv is not None and one.provenance is not None
    ]


def kinds(found: list[tuple[ChunkKV, KVProvenance]]) -> list[str]:
    return [provenance.kind for _, provenance in found]


@pytest.mark.parametrize("storage", STORAGES)
def test_placed_kv_is_the_preparations_kv_quantised_and_dequantised(
    adapter: Adapter, tmp_path: Path, storage: Storage
) -> None:
    with ChunkStore(tmp_path) as store:
        recipe = recipe_named("reuse", storage=storage)
        assert prepare(adapter, store, recipe) == len(TEXTS)
        assert prepare(adapter, store, recipe) == 0
        ctx = ctx_of(adapter, store)
        found = placed(adapter, store, recipe.name)
        assert len(found) == len(TEXTS)
        for text, (kv, provenance) in zip(TEXTS, found, strict=True):
            plain = Isolated().compute(ctx, adapter.template.chunk_ids(text)).kv
            assert torch.equal(kv.kv, quantise(plain.kv, storage).all_layers())
            assert not torch.equal(kv.kv, plain.kv)
            assert provenance.kind == f"isolated-{storage}"
            assert not provenance.exact
        sizes = store.stats().by_kind
        assert sizes.keys() == {"bare", f"isolated-{storage}"}  # the system prefix is exact


@pytest.mark.parametrize("storage", STORAGES)
def test_kv_computed_after_it_is_not_stored(adapter: Adapter, tmp_path: Path, storage: Storage) -> None:
    tokens = adapter.template.render(PROMPT)
    with ChunkStore(tmp_path) as store:
        ctx = ctx_of(adapter, store)
        ctx.prefix_kv()
        recipe = recipe_named("cacheblend", storage=storage)
        chunks = [adapter.template.chunk_ids(text) for text in TEXTS]
        prepare_chunks(ctx, chunks[:1], recipe)
        for method in (
            "prefix",
            "cacheblend",
        ):  # the first finds the exact path, which starts with isolated KV
            result = run(recipe_named(method, storage=storage), adapter, store, tokens)
            first, *others = (span for span in result.plan.spans if span.kind == "chunk")
            assert first.origin == ("fresh" if method == "prefix" else "reused")
            assert {span.origin for span in others} == {"fresh"}
            if method == "cacheblend":
                assert result.new_entries == ()


def test_recomputing_all_gives_full_attention_and_exact_entries(adapter: Adapter, tmp_path: Path) -> None:
    """The last of three chunks is not stored: it is exact, because all rows before it are recomputed."""
    tokens = adapter.template.render(PROMPT)
    with ChunkStore(tmp_path) as store:
        recipe = recipe_named("cacheblend", storage="int4")
        prepare_chunks(ctx_of(adapter, store), map(adapter.template.chunk_ids, TEXTS[:2]), recipe)
        result = run(recipe, adapter, store, tokens, ratio=1.0)
        with torch.no_grad():
            plain = adapter.model(torch.tensor([tokens.token_ids]), use_cache=False).logits[:, -1]
        torch.testing.assert_close(result.logits, plain, atol=1e-4, rtol=1e-4)
        assert remember(result) == 1
        span, ids = tokens.spans[3], tokens.ids(tokens.spans[3])
        found = store.get(adapter.fingerprint, ids, result.request.exact_provenance(3))
        assert found is not None
        whole = adapter.encode(tokens.token_ids[: span.end])
        torch.testing.assert_close(found.kv, whole.kv[:, :, :, span.start :], atol=1e-4, rtol=1e-4)
        assert store.stats().by_kind.keys() == {"bare", "isolated-int4", "observed"}


def test_two_storages_in_one_store_are_separate(adapter: Adapter, tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as coded, ChunkStore(tmp_path) as exact:
        prepare(adapter, coded, recipe_named("reuse", storage="int8"))
        assert placed(adapter, exact, "reuse") == []
        ids = [adapter.template.chunk_ids(text) for text in TEXTS]
        named = [(digest_tokens(one), len(one)) for one in ids]
        assert list(missing_bytes(ctx_of(adapter, exact), named, recipe_named("reuse"))) == [0, 1, 2]
        prepare(adapter, exact, recipe_named("reuse"))
        # The first chunk is stored on the exact path now, which every recipe prefers.
        assert kinds(placed(adapter, exact, "reuse")) == ["observed", "isolated", "isolated"]
        found = placed(adapter, coded, "isolated-int8+reuse")
        assert kinds(found) == ["observed", "isolated-int8", "isolated-int8"]
        # Exact KV is used where quantised KV is missing.
        found = placed(adapter, coded, "isolated-int4+reuse")
        assert kinds(found) == ["observed", "isolated", "isolated"]


def test_neighbours_stored_on_the_way_are_quantised_too(adapter: Adapter, tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        recipe = recipe_named("similar-int8+reuse")
        prepare(adapter, store, recipe)
        assert store.stats().by_kind.keys() == {"bare", "isolated-int8", "similar-10-int8"}
        used = placed(adapter, store, recipe.name)
        assert kinds(used) == ["isolated-int8", "similar-10-int8", "similar-10-int8"]
        *others, last = (adapter.template.chunk_ids(text) for text in TEXTS)
        corpus = ctx_of(adapter, store).corpus
        isolated = {ids: Isolated().compute(ctx_of(adapter, store), ids).kv for ids in others}
        neighbours = [ChunkKV(ids, quantise(isolated[ids].kv, "int8")) for ids in corpus.similar(last, 10)]
        expected = adapter.encode(last, ctx_of(adapter, store).prefix_kv(), *neighbours)
        kv, _ = used[-1]
        assert torch.equal(kv.kv, quantise(expected.kv, "int8").all_layers())
        assert storage_of(kv) == "int8"


@pytest.mark.parametrize("storage", STORAGES)
def test_extracting_features_leaves_no_exact_copies(
    adapter: Adapter, tmp_path: Path, storage: Storage
) -> None:
    """Context sensitivity compares KV as computed, after neighbours as stored, with isolated KV as stored."""
    with ChunkStore(tmp_path) as store:
        prepare(adapter, store, recipe_named("weave", storage=storage))
        made = {"bare", f"isolated-{storage}", f"woven-5-1-{storage}", "moved-woven-5-1"}
        assert store.stats().by_kind.keys() == made
        ctx = ctx_of(adapter, store)
        first, *others = (tuple(adapter.template.chunk_ids(text)) for text in TEXTS)
        alone = {ids: Isolated().compute(ctx, ids).kv for ids in (first, *others)}
        near = [ChunkKV(ids, quantise(alone[ids].kv, storage)) for ids in ctx.corpus.similar(first, 10)]
        moved = adapter.encode(first, ctx.prefix_kv(), *near).kv
        plain = quantise(alone[first].kv, storage).all_layers()
        off = (moved - plain).square().sum(dim=(2, 4)).sqrt() / plain.square().sum(dim=(2, 4)).sqrt()
        provenance = ContextSensitivity().provenance(adapter, ctx.prefix, len(first))
        (feature,) = store.find_features(adapter.fingerprint, [(first, provenance)])
        assert feature is not None
        torch.testing.assert_close(feature.tensors["moved"], off.mean(dim=(0, 1)))
        kinds_found = kinds(placed(adapter, store, f"{storage}+weave"))
        assert kinds_found == [f"isolated-{storage}", f"woven-5-1-{storage}", f"woven-5-1-{storage}"]


def test_the_first_chunk_takes_kv_that_was_computed_without_others(adapter: Adapter, tmp_path: Path) -> None:
    """It is full attention's but for rounding; what `woven` has of it was computed after chunks that this prompt lacks."""
    with ChunkStore(tmp_path) as store:
        prepare(adapter, store, recipe_named("weave", storage="int8"))
        tokens = adapter.template.render(Prompt("When does the bell ring?", TEXTS[:1]))
        kept = run(recipe_named("int8+weave"), adapter, store, tokens, ratio=0.0)
        full = run(recipe_named("full"), adapter, store, tokens)
        assert kept.plan.recomputed_tokens == 0
        torch.testing.assert_close(kept.logits, full.logits, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_every_preparation_is_quantised_or_refuses_with_a_reason(name: str) -> None:
    plain = recipe_named(name)
    if plain.prepare.max_versions is not None:
        with pytest.raises(InvalidRequest, match="keeps exact versions of chunks cannot be stored as int8"):
            recipe_named(name, storage="int8")
        return
    coded = recipe_named(name, storage="int8")
    if plain.prepare == NotPrepared():
        assert coded == plain
        return
    assert coded.name.endswith(f"int8+{name}")
    assert recipe_named(coded.name) == coded == recipe_named(f"int8+{name}")


def test_names() -> None:
    assert recipe_named("prophetkv", storage="int4").name == "isolated-int4+prophetkv"
    assert recipe_named("prophetkv", "similar-int8").name == "similar-int8+prophetkv"
    assert recipe_named("prophetkv", "similar", storage="int8").name == "similar-int8+prophetkv"
    assert recipe_named("similar-int4+prophetkv", storage="int8").name == "similar-int4+prophetkv"
    assert recipe_named("isolated-exact+prophetkv", storage="int8").name == "prophetkv"
    with pytest.raises(InvalidRequest, match="there is no storage 'int2'; choose one of exact, int8, int4"):
        recipe_named("reuse", storage="int2")
    with pytest.raises(UnknownRecipe, match="there is no preparation 'similar-int2'"):
        recipe_named("similar-int2+reuse")
    with pytest.raises(InvalidRequest, match="prepares nothing, also not as 'isolated'; leave it or"):
        recipe_named("isolated-int8+full")
