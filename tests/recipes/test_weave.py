"""weave against its definition: how far tokens move, and what attention makes of it."""

import pytest
import torch
from contract import SELECTING, corpus_of, prefilled, prepare

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.assembled import Assembled
from kvweave.recipes.attend import Causal
from kvweave.recipes.context import NoCorpus, Workshop
from kvweave.recipes.features import Moved
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.weave import AttendedMovement
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prepare import Similar
from kvweave.recipes.state import Budget, PrefillRequest


def scene_of(adapter, store, prompt):
    recipe = recipe_named("weave")
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placement = recipe.place.place(request, matched)
    return Assembled(request, adapter.canvas(request.prompt.tokens, placement.spans), matched, Causal())


def shop_of(adapter, prompt, corpus=None):
    prefix = adapter.template.prefix_ids(prompt.system)
    return Workshop(adapter, MemoryStore(), prefix, corpus or corpus_of(adapter, prompt))


def test_movement_is_the_relative_distance_from_the_kv_that_ordinary_passes_make(adapter, prompt):
    """Behind one neighbour, whose isolated KV equals that of a plain pass over S ++ neighbour ++ chunk."""
    shop = shop_of(adapter, prompt)
    chunk = tuple(adapter.template.chunk_ids(prompt.chunks[1]))
    neighbour = shop.corpus.similar(chunk, 1)[0]
    start = len(shop.prefix)
    alone = adapter.encode((*shop.prefix, *chunk)).kv[:, :, :, start:]
    behind = adapter.encode((*shop.prefix, *neighbour, *chunk)).kv[:, :, :, start + len(neighbour) :]
    (kept,) = Moved(Similar(1)).make(shop, [chunk])
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
    shop = shop_of(adapter, prompt, NoCorpus())
    assert not list(Moved().make(shop, [tuple(adapter.template.chunk_ids(prompt.chunks[0]))]))


def test_scores_are_attention_times_movement(adapter, store, prompt):
    prepare(adapter, store, prompt, "weave")
    scene = scene_of(adapter, store, prompt)
    request, (first, _) = scene.request, scene.context
    probe = AttentionProbe(scene.asked, columns=scene.context)
    scene.run(scene.fresh, probe)
    attention = probe.weights.mean(dim=0)
    expected = []
    for found in scene.matched:
        if found.origin != "reused":
            continue
        ids = request.prompt.ids(found.span)
        making = Moved().making(adapter, request.prompt.ids(request.prompt.spans[0]), len(ids))
        (note,) = store.find_notes(adapter.fingerprint, [(ids, making)])
        expected.append(attention[found.span.start - first : found.span.end - first] * note.tensors["moved"])
    got = AttendedMovement().scores(scene_of(adapter, store, prompt))
    torch.testing.assert_close(got, torch.cat(expected))
    assert (got > 0).all()


@pytest.mark.parametrize("noted", [0, 2])
def test_where_nothing_is_recorded_attention_decides_alone(adapter, store, prompt, noted):
    prepare(adapter, store, prompt, "following+prophetkv")
    if noted:
        shop = Workshop(
            adapter, store, adapter.template.prefix_ids(prompt.system), corpus_of(adapter, prompt)
        )
        chunks = [adapter.template.chunk_ids(text) for text in prompt.chunks[:noted]]
        prepare_chunks(shop, chunks, recipe_named("weave"))
    scene = scene_of(adapter, store, prompt)
    without = [found.span.tokens for found in scene.matched if found.origin == "reused"][noted:]
    attention = AttendedMovement().attention.scores(scene_of(adapter, store, prompt))[-sum(without) :]
    ratio = AttendedMovement().scores(scene)[-sum(without) :] / attention
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert noted or ratio[0] == pytest.approx(1.0)


def test_weave_takes_no_more_passes_to_select_than_prophetkv(adapter, store, prompt, monkeypatch):
    rows = {}
    for name in ("weave", "prophetkv"):
        prepare(adapter, store, prompt, name)
        computed = []
        compute = type(adapter).compute

        def counted(self, canvas, ids, plan, *, computed=computed, compute=compute, **kwargs):
            computed.append(plan.rows.numel())
            return compute(self, canvas, ids, plan, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(type(adapter), "compute", counted)
            prefilled(adapter, store, prompt, name, ratio=0.1)
        rows[name] = computed
    assert "weave" in SELECTING
    assert len(rows["weave"]) == 2
    assert rows["weave"] == rows["prophetkv"]
