"""weave against its definition: how far tokens move, and what attention makes of it."""

import pytest
import torch
from contract import SELECTING, corpus_of, prefilled, prepare

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.attend import Causal
from kvweave.recipes.context import NoCorpus, PrepareContext
from kvweave.recipes.features import ContextSensitivity
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.weave import AttendedMovement
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prepare import Similar
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.state import PrefillState


def scene_of(adapter, store, prompt):
    recipe = recipe_named("weave")
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placement = recipe.place.place(request, matched)
    return PrefillState(request, adapter.new_cache(request.prompt.tokens, placement.spans), matched, Causal())


def shop_of(adapter, prompt, corpus=None):
    prefix = adapter.template.prefix_ids(prompt.system)
    return PrepareContext(adapter, MemoryStore(), prefix, corpus or corpus_of(adapter, prompt))


def test_movement_is_the_relative_distance_from_the_kv_that_ordinary_passes_make(adapter, prompt):
    """Behind one neighbour, whose isolated KV equals that of a plain pass over S ++ neighbour ++ chunk."""
    ctx = shop_of(adapter, prompt)
    chunk = tuple(adapter.template.chunk_ids(prompt.chunks[1]))
    neighbour = ctx.corpus.similar(chunk, 1)[0]
    start = len(ctx.prefix)
    alone = adapter.encode((*ctx.prefix, *chunk)).kv[:, :, :, start:]
    behind = adapter.encode((*ctx.prefix, *neighbour, *chunk)).kv[:, :, :, start + len(neighbour) :]
    (kept,) = ContextSensitivity(Similar(1)).make(ctx, [chunk])
    layers, two, groups, tokens, _ = alone.shape
    for token in range(tokens):
        shares = [
            (behind - alone)[layer, kind, :, token].norm() / alone[layer, kind, :, token].norm()
            for layer in range(layers)
            for kind in range(two)
        ]
        torch.testing.assert_close(
            kept.content.tensors["moved"][token], torch.stack(shares).mean(), atol=1e-4, rtol=1e-3
        )
    assert groups > 1
    assert len(kept.sources) == 2


def test_a_chunk_without_neighbours_gets_no_note(adapter, prompt):
    ctx = shop_of(adapter, prompt, NoCorpus())
    assert not list(ContextSensitivity().make(ctx, [tuple(adapter.template.chunk_ids(prompt.chunks[0]))]))


def test_scores_are_attention_times_movement(adapter, store, prompt):
    prepare(adapter, store, prompt, "weave")
    state = scene_of(adapter, store, prompt)
    request, (first, _) = state.request, state.context
    probe = AttentionProbe(state.asked, columns=state.context)
    state.run(state.fresh, probe)
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
    got = AttendedMovement().scores(scene_of(adapter, store, prompt))
    torch.testing.assert_close(got, torch.cat(expected))
    assert (got > 0).all()


@pytest.mark.parametrize("noted", [0, 2])
def test_where_nothing_is_recorded_attention_decides_alone(adapter, store, prompt, noted):
    prepare(adapter, store, prompt, "following+prophetkv")
    if noted:
        ctx = PrepareContext(
            adapter, store, adapter.template.prefix_ids(prompt.system), corpus_of(adapter, prompt)
        )
        chunks = [adapter.template.chunk_ids(text) for text in prompt.chunks[:noted]]
        prepare_chunks(ctx, chunks, recipe_named("weave"))
    state = scene_of(adapter, store, prompt)
    without = [found.span.tokens for found in state.matched if found.origin == "reused"][noted:]
    attention = AttendedMovement().attention.scores(scene_of(adapter, store, prompt))[-sum(without) :]
    ratio = AttendedMovement().scores(state)[-sum(without) :] / attention
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert noted or ratio[0] == pytest.approx(1.0)


def test_weave_takes_no_more_passes_to_select_than_prophetkv(adapter, store, prompt, monkeypatch):
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
