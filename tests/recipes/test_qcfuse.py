"""QCFuse against its definition: digests, the probe behind them and its attention, written out."""

import json
import math
from dataclasses import replace

import pytest
import torch

import kvweave
from kvweave.errors import StoreError
from kvweave.models.critical_layers import middle_layers, read_layers, write_layers
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.models.loading import load_model
from kvweave.recipes.attend import Causal
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.features import Importance
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.qcfuse import AttentionBehindDigests
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState
from kvweave.testing import tiny_adapter, tiny_model
from kvweave.types import ChunkKV


def prepare(adapter, store, prompt, score, most=None):
    recipe = Recipe("probe", select=Highest(score))
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(prompt.system))
    prepare_chunks(ctx, [adapter.template.chunk_ids(chunk) for chunk in prompt.chunks[:most]], recipe)


def scene_of(adapter, store, prompt):
    recipe = recipe_named("qcfuse")
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placement = recipe.place.place(request, matched)
    return PrefillState(request, adapter.new_cache(request.prompt.tokens, placement.spans), matched, Causal())


def importance(adapter, store, state, found):
    ids = state.request.prompt.ids(found.span)
    prefix = state.request.prompt.ids(state.request.prompt.spans[0])
    (feature,) = store.find_features(
        adapter.fingerprint, [(ids, Importance().provenance(adapter, prefix, len(ids)))]
    )
    return feature.tensors["importance"]


class Queries:
    """What every layer of a pass attends with."""

    def __init__(self) -> None:
        self.seen = []

    def see(self, queries):
        self.seen.append(queries)


def written_out(adapter, store, state, asked, share, layers):
    """The probe with one stored span for each token, and the softmax over all keys before, as the docstring has it."""
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
    stored = scene_of(adapter, store, asked).kv_cache
    found = []
    for layer in layers:
        seen = queries.seen[layer]
        keys = stored.held_keys(layer, seen.keys).clone()
        keys[:, :, state.fresh] = seen.keys[:, :, fresh]
        query = seen.query[0, :, [fresh.index(rows.index(row)) for row in state.asked.tolist()]]
        repeated = keys[0].repeat_interleave(query.shape[0] // keys.shape[1], dim=0)
        logits = query @ repeated.transpose(1, 2) * seen.scaling
        visible = torch.arange(prompt.tokens)[None] <= state.asked[:, None]
        found.append(logits.masked_fill(~visible, float("-inf")).softmax(dim=-1).mean(dim=(0, 1)))
    return torch.stack(found).mean(dim=0)[state.stale]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("most", [4, 2])
def test_scores_are_the_attention_of_queries_made_behind_digests(adapter, store, prompt, share, most):
    """Of four chunks all are stored, or two, and the others computed in the probe."""
    score = AttentionBehindDigests(share, layers=(0, -1))
    prepare(adapter, store, prompt, score, most)
    state = scene_of(adapter, store, prompt)
    assert state.stale.numel() > 0
    expected = written_out(adapter, store, state, prompt, share, (0, 2))
    torch.testing.assert_close(score.scores(state), expected, atol=1e-5, rtol=1e-4)


def test_whole_chunks_and_all_layers_are_the_questions_attention_over_stale_kv(adapter, store, prompt):
    score = AttentionBehindDigests(1.0, layers=(0, 1, 2))
    prepare(adapter, store, prompt, score)
    state = scene_of(adapter, store, prompt)
    scores = score.scores(state)
    probe = AttentionProbe(state.asked)
    state.run(state.fresh, probe)
    torch.testing.assert_close(scores, probe.weights.mean(dim=0)[state.stale], atol=1e-5, rtol=1e-4)
    assert not score.extractors  # nothing has to be recorded for whole chunks


class Read:
    """A chunk's KV that notes which of its layers were read."""

    awaited_s = 0.0

    def __init__(self, kv, layers):
        self.kv, self.layers, self.shape, self.dtype, self.nbytes = kv, layers, kv.shape, kv.dtype, kv.nbytes

    def load(self, index):
        pass  # ahead of a pass, which is no use of it yet

    def layer(self, index):
        self.layers.add(index)
        return self.kv[index]

    def whole(self):
        self.layers.update(range(len(self.kv)))
        return self.kv


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_of_stored_chunks_no_layer_is_read_behind_the_chosen_ones(adapter, store, prompt, share):
    score = AttentionBehindDigests(share, layers=(0, 1))
    prepare(adapter, store, prompt, score)
    state = scene_of(adapter, store, prompt)
    expected, layers = score.scores(state), set()
    matched = tuple(
        replace(found, kv=ChunkKV(found.kv.token_ids, Read(found.kv.kv, layers)))
        if found.origin == "reused"
        else found
        for found in state.matched
    )
    spans = [PlacedSpan(found.kv, found.span.start, found.span.start) for found in matched if found.kv]
    watched = PrefillState(
        state.request, adapter.new_cache(state.request.prompt.tokens, spans), matched, Causal()
    )
    torch.testing.assert_close(score.scores(watched), expected)
    assert layers == {0, 1}


def test_a_digest_is_what_repeating_the_chunk_looks_at(adapter, store, prompt):
    plain = tiny_model()
    plain.set_attn_implementation("eager")
    prepare(adapter, store, prompt, AttentionBehindDigests())
    state = scene_of(adapter, store, prompt)
    prefix = state.request.prompt.ids(state.request.prompt.spans[0])
    for found in state.matched[1:-1]:
        ids = state.request.prompt.ids(found.span)
        with torch.no_grad():
            out = plain(torch.tensor([[*prefix, *ids, *ids]]), output_attentions=True)
        paid = torch.cat(out.attentions)[:, :, -len(ids) :, len(prefix) : len(prefix) + len(ids)]
        peak = paid.amax(dim=(0, 1, 2))
        torch.testing.assert_close(importance(adapter, store, state, found), peak, atol=1e-5, rtol=1e-4)


def test_a_chunk_whose_repetition_has_no_room_is_repeated_as_far_as_it_goes(store):
    adapter = tiny_adapter()
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(None))
    room = adapter.geometry.context_tokens - len(ctx.prefix)
    long = tuple(3 + number % 200 for number in range(room - 5))
    full = tuple(3 + number % 200 for number in range(room))
    some, none = (kept.content.tensors["importance"] for kept in Importance().make(ctx, [long, full]))
    assert some.shape == (room - 5,)
    assert (some > 0).all()
    assert not none.any()


def test_a_chunk_whose_digest_is_gone_takes_part_whole(adapter, store, prompt):
    kvweave.prepare(adapter, store, prompt.chunks, system=prompt.system)  # no notes
    state = scene_of(adapter, store, prompt)
    got = AttentionBehindDigests(0.1, layers=(1,)).scores(state)
    torch.testing.assert_close(got, AttentionBehindDigests(1.0, layers=(1,)).scores(state))


def test_the_layers_are_the_models_critical_ones(store, prompt):
    adapter = tiny_adapter()
    assert adapter.critical_layers == (0, 1, 2)
    recipe = recipe_named("qcfuse")
    prepare(adapter, store, prompt, recipe.select.score)
    adapter.critical_layers = (1,)
    tokens = adapter.template.render(prompt)
    chosen = run(recipe, adapter, store, tokens, ratio=0.2).selected
    scores = AttentionBehindDigests(layers=(1,)).scores(scene_of(adapter, store, prompt))
    best = scores.argsort(descending=True, stable=True)[: chosen.numel()]
    assert set(chosen.tolist()) == set(scene_of(adapter, store, prompt).stale[best].tolist())


class TestCriticalLayers:
    @pytest.mark.parametrize(
        ("layers", "middle"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (8, (2, 3, 4)), (24, (10, 11, 12))]
    )
    def test_are_in_the_middle_until_they_are_measured(self, layers, middle):
        assert middle_layers(layers) == middle

    def test_are_read_when_the_model_is_loaded(self, tmp_path):
        model = load_model(home=tmp_path).fingerprint
        path = write_layers(tmp_path, model, {"critical_layers": (0, 3), "samples": 2})
        assert json.loads(path.read_text())["critical_layers"] == [0, 3]
        assert load_model(home=tmp_path).critical_layers == (0, 3)
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize("content", ["{", "[]", '{"critical_layers": 3}', '{"critical_layers": [0, 9]}'])
    def test_in_a_file_that_cannot_be_used_are_passed_over_with_a_word(
        self, adapter, tmp_path, caplog, content
    ):
        path = write_layers(tmp_path, adapter.fingerprint, {})
        path.write_text(content)
        assert read_layers(tmp_path, adapter.fingerprint, 3) == (0, 1, 2)
        assert "kvweave profile-layers" in caplog.text

    def test_that_cannot_be_written_say_where(self, adapter, tmp_path):
        (tmp_path / "models").write_text("in the way")
        with pytest.raises(StoreError, match="--home"):
            write_layers(tmp_path, adapter.fingerprint, {})
