"""QCFuse against its definition: digests, the probe after them and its attention, spelled out."""

import json
import math
from dataclasses import replace

import pytest
import torch

import kvweave
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.models.loading import layers_file, load_model, read_layers
from kvweave.models.support import middle_layers
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.qcfuse import DigestAttention, Importance
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.place import Causal
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import TopScores
from kvweave.testing import tiny_adapter, tiny_model
from kvweave.types import ChunkKV
from support.contract import state_of


def prepare(adapter, store, prompt, score, most=None):
    recipe = Recipe("probe", select=TopScores(score))
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(prompt.system))
    prepare_chunks(ctx, [adapter.template.chunk_ids(chunk) for chunk in prompt.chunks[:most]], recipe)


def importance(adapter, store, state, found):
    ids = state.request.prompt.ids(found.span)
    prefix = state.request.prompt.ids(state.request.prompt.spans[0])
    (feature,) = store.find_features(
        adapter.fingerprint, [(ids, Importance().provenance(adapter, prefix, len(ids)))]
    )
    return feature.tensors["importance"]


class Queries:
    """Records what every layer of a pass attends with."""

    def __init__(self) -> None:
        self.seen = []

    def on_layer(self, queries):
        self.seen.append(queries)


def spelled_out(adapter, store, state, asked, share, layers):
    """The probe with one stored span per token, and the softmax over all earlier keys, as in the docstring."""
    prompt, rows, spans = state.request.prompt, [], []
    for found in state.matched:
        inside = list(range(found.span.tokens))
        stored_chunk = found.span.kind == "chunk" and found.kv is not None
        if stored_chunk and share == 0:
            inside = []
        elif stored_chunk and share < 1:
            order = importance(adapter, store, state, found).argsort(descending=True, stable=True).tolist()
            inside = sorted({*order[: math.ceil(share * len(inside))], *inside[:4]})
        for i in inside:
            if found.kv is not None:
                one = ChunkKV((found.kv.token_ids[i],), found.kv.kv[:, :, :, i : i + 1])
                spans.append(PlacedSpan(one, len(rows), found.span.start + i))
            rows.append(found.span.start + i)
    positions = torch.tensor(rows)
    fresh = [rows.index(row) for row in state.fresh.tolist()]
    plan, queries = adapter.rows(torch.tensor(fresh)), Queries()
    plan.hooks.append(queries)
    adapter.compute(
        adapter.new_cache(len(rows), spans, positions), [prompt.token_ids[row] for row in rows], plan
    )
    stored = state_of(adapter, store, asked, "qcfuse").kv_cache
    found = []
    for layer in layers:
        seen = queries.seen[layer]
        keys = stored.layer_kv(layer, seen.keys)[0].clone()
        keys[:, :, state.fresh] = seen.keys[:, :, fresh]
        query = seen.query[0, :, [fresh.index(rows.index(row)) for row in state.question_rows.tolist()]]
        repeated = keys[0].repeat_interleave(query.shape[0] // keys.shape[1], dim=0)
        logits = query @ repeated.transpose(1, 2) * seen.settings.scaling
        visible = torch.arange(prompt.tokens)[None] <= state.question_rows[:, None]
        found.append(logits.masked_fill(~visible, float("-inf")).softmax(dim=-1).mean(dim=(0, 1)))
    return torch.stack(found).mean(dim=0)[state.stale]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("most", [4, 2])
def test_scores_are_the_attention_of_queries_computed_after_digests(adapter, store, prompt, share, most):
    """All four chunks are stored, or two, and the probe computes the others."""
    score = DigestAttention(share, layers=(0, -1))
    prepare(adapter, store, prompt, score, most)
    state = state_of(adapter, store, prompt, "qcfuse")
    assert state.stale.numel() > 0
    expected = spelled_out(adapter, store, state, prompt, share, (0, 2))
    torch.testing.assert_close(score.scores(state), expected, atol=1e-5, rtol=1e-4)


def test_whole_chunks_and_all_layers_give_the_questions_attention_over_stale_kv(adapter, store, prompt):
    score = DigestAttention(1.0, layers=(0, 1, 2))
    prepare(adapter, store, prompt, score)
    state = state_of(adapter, store, prompt, "qcfuse")
    scores = score.scores(state)
    probe = AttentionProbe(state.question_rows)
    adapter.run_partial(state.kv_cache, state.request.prompt.token_ids, state.plan(state.fresh, probe))
    torch.testing.assert_close(scores, probe.weights.mean(dim=0)[state.stale], atol=1e-5, rtol=1e-4)
    assert not score.extractors  # whole chunks need no feature


class Read:
    """A chunk's KV that records which of its layers were read."""

    layer_wait_s = 0.0

    def __init__(self, kv, layers):
        self.kv, self.layers, self.shape, self.dtype, self.nbytes = kv, layers, kv.shape, kv.dtype, kv.nbytes

    def load(self, index):
        pass  # before a pass, which does not count as reading

    def layer(self, index):
        self.layers.add(index)
        return self.kv[index]

    def all_layers(self):
        self.layers.update(range(len(self.kv)))
        return self.kv


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_no_layer_of_stored_chunks_after_the_chosen_ones_is_read(adapter, store, prompt, share):
    score = DigestAttention(share, layers=(0, 1))
    prepare(adapter, store, prompt, score)
    state = state_of(adapter, store, prompt, "qcfuse")
    expected, layers = score.scores(state), set()
    matched = tuple(
        replace(found, kv=ChunkKV(found.kv.token_ids, Read(found.kv.kv, layers)))
        if found.origin == "reused"
        else found
        for found in state.matched
    )
    spans = [PlacedSpan(found.kv, found.span.start, found.span.start) for found in matched if found.kv]
    recorded_state = PrefillState(
        state.request, adapter.new_cache(state.request.prompt.tokens, spans), matched, Causal()
    )
    torch.testing.assert_close(score.scores(recorded_state), expected)
    assert layers == {0, 1}


def test_importance_is_the_peak_attention_of_the_repetition(adapter, store, prompt):
    plain = tiny_model()
    plain.set_attn_implementation("eager")
    prepare(adapter, store, prompt, DigestAttention())
    state = state_of(adapter, store, prompt, "qcfuse")
    prefix = state.request.prompt.ids(state.request.prompt.spans[0])
    for found in state.matched[1:-1]:
        ids = state.request.prompt.ids(found.span)
        with torch.no_grad():
            out = plain(torch.tensor([[*prefix, *ids, *ids]]), output_attentions=True)
        paid = torch.cat(out.attentions)[:, :, -len(ids) :, len(prefix) : len(prefix) + len(ids)]
        peak = paid.amax(dim=(0, 1, 2))
        torch.testing.assert_close(importance(adapter, store, state, found), peak, atol=1e-5, rtol=1e-4)


def test_a_repetition_is_cut_to_the_context(store):
    adapter = tiny_adapter()
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(None))
    room = adapter.geometry.context_tokens - len(ctx.prefix)
    long = tuple(3 + number % 200 for number in range(room - 5))
    full = tuple(3 + number % 200 for number in range(room))
    some, none = (entry.content.tensors["importance"] for entry in Importance().extract(ctx, [long, full]))
    assert some.shape == (room - 5,)
    assert (some > 0).all()
    assert not none.any()


def test_a_chunk_without_a_digest_takes_part_whole(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, system=prompt.system)  # no features
    state = state_of(adapter, store, prompt, "qcfuse")
    got = DigestAttention(0.1, layers=(1,)).scores(state)
    torch.testing.assert_close(got, DigestAttention(1.0, layers=(1,)).scores(state))


def test_the_layers_are_the_models_critical_ones(store, prompt):
    adapter = tiny_adapter()
    assert adapter.critical_layers == (0, 1, 2)
    recipe = recipe_named("qcfuse")
    prepare(adapter, store, prompt, recipe.select.score)
    adapter.critical_layers = (1,)
    tokens = adapter.template.render(prompt)
    chosen = run(recipe, adapter, store, tokens, ratio=0.2).selected
    scores = DigestAttention(layers=(1,)).scores(state_of(adapter, store, prompt, "qcfuse"))
    best = scores.argsort(descending=True, stable=True)[: chosen.numel()]
    assert set(chosen.tolist()) == set(state_of(adapter, store, prompt, "qcfuse").stale[best].tolist())


class TestCriticalLayers:
    @pytest.mark.parametrize(
        ("layers", "middle"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (8, (2, 3, 4)), (24, (10, 11, 12))]
    )
    def test_are_the_middle_ones_until_measured(self, layers, middle):
        assert middle_layers(layers) == middle

    def test_are_read_when_the_model_is_loaded(self, tmp_path):
        path = layers_file(tmp_path, load_model(home=tmp_path).fingerprint)
        path.parent.mkdir()
        path.write_text(json.dumps({"critical_layers": [0, 3], "samples": 2}))
        assert load_model(home=tmp_path).critical_layers == (0, 3)

    @pytest.mark.parametrize("content", ["{", "[]", '{"critical_layers": 3}', '{"critical_layers": [0, 9]}'])
    def test_in_an_unusable_file_are_ignored_with_a_warning(self, adapter, tmp_path, caplog, content):
        path = layers_file(tmp_path, adapter.fingerprint)
        path.parent.mkdir()
        path.write_text(content)
        assert read_layers(tmp_path, adapter.fingerprint, 3) == (0, 1, 2)
        assert "kvweave profile-layers" in caplog.text
