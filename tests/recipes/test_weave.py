"""weave against its definition: how far tokens move, times attention."""

import pytest
import torch

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.candidates import Candidate
from kvweave.recipes.context import NoCorpus, PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.weave import ContextSensitivity
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prepare import Similar
from kvweave.recipes.select import QuestionAttention
from support.contract import SELECTING, corpus_of, prefilled, prepare, state_of

NAMES = [("weave",), ("int4+weave",), ("following+weave",), ("isolated+weave",)]


def ctx_of(adapter, prompt, corpus=None):
    prefix = adapter.template.prefix_ids(prompt.system)
    return PrepareContext(adapter, MemoryStore(), prefix, corpus or corpus_of(adapter, prompt))


def scores(state):
    return recipe_named("weave").select.score.scores(state)


def test_context_sensitivity_is_the_relative_distance_of_kv_from_ordinary_passes(adapter, prompt):
    """After one neighbour, whose isolated KV equals that of a plain pass over S ++ neighbour ++ chunk."""
    ctx = ctx_of(adapter, prompt)
    chunk = tuple(adapter.template.chunk_ids(prompt.chunks[1]))
    neighbour = ctx.corpus.similar(chunk, 1)[0]
    start = len(ctx.prefix)
    alone = adapter.encode((*ctx.prefix, *chunk)).kv[:, :, :, start:]
    moved = adapter.encode((*ctx.prefix, *neighbour, *chunk)).kv[:, :, :, start + len(neighbour) :]
    (entry,) = ContextSensitivity(Similar(1)).extract(ctx, [chunk])
    layers, two, groups, tokens, _ = alone.shape
    for token in range(tokens):
        shares = [
            (moved - alone)[layer, kind, :, token].norm() / alone[layer, kind, :, token].norm()
            for layer in range(layers)
            for kind in range(two)
        ]
        torch.testing.assert_close(
            entry.content.tensors["moved"][token], torch.stack(shares).mean(), atol=1e-4, rtol=1e-3
        )
    assert groups > 1
    assert len(entry.sources) == 2


def test_preparing_measures_on_the_way_what_a_pass_of_its_own_would(adapter, prompt, monkeypatch):
    """Two passes a chunk: alone, and after its neighbours. The feature comes with the second."""
    ctx = ctx_of(adapter, prompt)
    chunks = [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]
    ctx.prefix_kv()
    computed, encode = [], adapter.encode
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "encode", lambda ids, *before: computed.append(ids) or encode(ids, *before))
        prepare_chunks(ctx, chunks, recipe_named("weave"))
    assert sorted(computed) == sorted([*chunks, *chunks])
    assert [Candidate(recipe_named(*name), None, 0.0).offline_passes for name in NAMES] == [2, 2, 3, 2]
    extracted = list(ContextSensitivity().extract(ctx, chunks))
    assert len(extracted) == len(chunks)
    for entry in extracted:
        (stored,) = ctx.store.find_features(
            adapter.fingerprint, [(entry.content.token_ids, entry.provenance)]
        )
        torch.testing.assert_close(stored.tensors["moved"], entry.content.tensors["moved"])


def ranks(moved):
    return moved.argsort().argsort().float()


@pytest.mark.parametrize(("storage", "agreement"), [("int8", 0.99), ("int4", 0.9)])
def test_quantised_isolated_kv_leaves_the_order_of_the_tokens(adapter, prompt, storage, agreement):
    found = {}
    chunks = [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]
    for each in ("exact", storage):
        ctx = ctx_of(adapter, prompt)
        prepare_chunks(ctx, chunks, recipe_named("weave", storage=each))
        wanted = [
            (ids, ContextSensitivity().provenance(adapter, tuple(ctx.prefix), len(ids))) for ids in chunks
        ]
        features = ctx.store.find_features(adapter.fingerprint, wanted)
        found[each] = ranks(torch.cat([feature.tensors["moved"] for feature in features]))
    assert torch.corrcoef(torch.stack(tuple(found.values())))[0, 1] > agreement


def test_a_chunk_without_neighbours_gets_no_feature(adapter, prompt):
    ctx = ctx_of(adapter, prompt, NoCorpus())
    assert not list(ContextSensitivity().extract(ctx, [tuple(adapter.template.chunk_ids(prompt.chunks[0]))]))


def test_scores_are_attention_times_context_sensitivity(adapter, store, prompt):
    prepare(adapter, store, prompt, "weave")
    state = state_of(adapter, store, prompt, "weave")
    request, (first, _) = state.request, state.context
    probe = AttentionProbe(state.question_rows, columns=state.context)
    adapter.run_partial(state.kv_cache, state.request.prompt.token_ids, state.plan(state.fresh, probe))
    attention = probe.weights.mean(dim=0)
    expected = []
    for found in state.matched:
        if found.origin != "reused":
            continue
        ids = request.prompt.ids(found.span)
        provenance = ContextSensitivity().provenance(
            adapter, request.prompt.ids(request.prompt.spans[0]), len(ids)
        )
        (feature,) = store.find_features(adapter.fingerprint, [(ids, provenance)])
        expected.append(
            attention[found.span.start - first : found.span.end - first] * feature.tensors["moved"]
        )
    got = scores(state_of(adapter, store, prompt, "weave"))
    torch.testing.assert_close(got, torch.cat(expected))
    assert (got > 0).all()


@pytest.mark.parametrize("with_features", [0, 2])
def test_without_features_attention_decides_alone(adapter, store, prompt, with_features):
    prepare(adapter, store, prompt, "following+prophetkv")
    if with_features:
        ctx = PrepareContext(
            adapter, store, adapter.template.prefix_ids(prompt.system), corpus_of(adapter, prompt)
        )
        chunks = [adapter.template.chunk_ids(text) for text in prompt.chunks[:with_features]]
        prepare_chunks(ctx, chunks, recipe_named("weave"))
    state = state_of(adapter, store, prompt, "weave")
    without = [found.span.tokens for found in state.matched if found.origin == "reused"][with_features:]
    attention = QuestionAttention().scores(state_of(adapter, store, prompt, "weave"))[-sum(without) :]
    ratio = scores(state)[-sum(without) :] / attention
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert with_features or ratio[0] == pytest.approx(1.0)


def test_weave_selects_with_as_many_passes_as_prophetkv(adapter, store, prompt, monkeypatch):
    rows = {}
    for name in ("weave", "prophetkv"):
        prepare(adapter, store, prompt, name)
        computed = []
        compute = type(adapter).compute

        def counted(self, kv_cache, ids, plan, *, computed=computed, compute=compute, **kwargs):
            computed.append(plan.rows.numel())
            return compute(self, kv_cache, ids, plan, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(type(adapter), "compute", counted)
            prefilled(adapter, store, prompt, name, ratio=0.1)
        rows[name] = computed
    assert "weave" in SELECTING
    assert len(rows["weave"]) == 2
    assert rows["weave"] == rows["prophetkv"]
