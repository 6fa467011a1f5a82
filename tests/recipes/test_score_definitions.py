"""EPIC's, FusionRAG's, ProphetKV's and the idealised selection against their definitions, on the library's own attention."""

import math

import pytest
import torch
from contract import prefilled, prepare
from transformers import DynamicCache

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.state import PrefillState
from kvweave.testing import tiny_model


@pytest.fixture(scope="module")
def plain():
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def scene_of(adapter, store, prompt, name):
    """A prompt of prepared chunks, and nothing computed yet."""
    recipe = recipe_named(name)
    prepare(adapter, store, prompt, name)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placed = recipe.place.place(request, matched)
    kv_cache = adapter.new_cache(request.prompt.tokens, placed.spans, placed.positions)
    return PrefillState(request, kv_cache, matched, recipe.attend)


def scored(state, name):
    return recipe_named(name).select.score.scores(state)


def over_stale(plain, adapter, store, prompt, name):
    """What the question attends to when an ordinary call goes on from the stale KV: (L, H, rows asked, N) of the prompt."""
    tokens = adapter.template.render(prompt)
    kv_cache = prefilled(adapter, store, prompt, name, ratio=0.0).kv_cache
    start, (first, end) = tokens.spans[-1].start, tokens.user_rows
    held = DynamicCache()
    for number, layer in enumerate(kv_cache.layers):
        held.update(layer.keys[:, :, :start].clone(), layer.values[:, :, :start].clone(), number)
    with torch.no_grad():
        out = plain(torch.tensor([tokens.token_ids[start:]]), past_key_values=held, output_attentions=True)
    return torch.stack([layer[0, :, first - start : end - start] for layer in out.attentions])


def of_context(weights, state):
    """Of all that is attended to what goes to the chunks, as shares of it: means over heads and rows, (L, context)."""
    first, end = state.context
    inside = weights[..., first:end]
    return (inside / inside.sum(dim=-1, keepdim=True)).mean(dim=(1, 2))


def test_epic_takes_the_same_number_of_first_tokens_from_every_chunk(adapter, store, prompt):
    prepare(adapter, store, prompt, "epic")
    for ratio in (0.03, 0.2, 0.5):
        result = prefilled(adapter, store, prompt, "epic", ratio=ratio)
        spans = [span for span in result.plan.spans if span.origin == "reused"]
        chosen = set(result.selected.tolist())
        taken = [len(chosen & set(range(span.start, span.end))) for span in spans]
        assert chosen == {
            row
            for span, count in zip(spans, taken, strict=True)
            for row in range(span.start, span.start + count)
        }
        assert sum(taken) == math.ceil(ratio * sum(span.tokens for span in spans))
        assert max(taken) - min(taken) <= 1


def test_prophetkv_asks_all_layers_and_leaves_prefix_and_question_out(adapter, store, prompt, plain):
    state = scene_of(adapter, store, prompt, "prophetkv")
    attended = of_context(over_stale(plain, adapter, store, prompt, "prophetkv"), state)
    expected = attended.mean(dim=0)[state.stale - state.context[0]]
    torch.testing.assert_close(scored(state, "prophetkv"), expected, atol=1e-6, rtol=1e-4)


def test_fusionrag_over_stale_asks_the_last_layer(adapter, store, prompt, plain):
    state = scene_of(adapter, store, prompt, "fusionrag-over-stale")
    attended = of_context(over_stale(plain, adapter, store, prompt, "fusionrag-over-stale"), state)
    expected = attended[-1][state.stale - state.context[0]]
    torch.testing.assert_close(scored(state, "fusionrag-over-stale"), expected, atol=1e-6, rtol=1e-4)


def test_fusionrag_multiplies_queries_behind_the_prefix_with_keys_before_rotation(
    adapter, store, prompt, plain
):
    state = scene_of(adapter, store, prompt, "fusionrag")
    tokens, last = state.request.prompt, plain.model.layers[-1].self_attn.q_proj
    question, seen = tokens.spans[-1], []
    hook = last.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with torch.no_grad():
        plain(torch.tensor([[*tokens.ids(tokens.spans[0]), *tokens.ids(question)]]))
    hook.remove()
    first, end = (tokens.spans[0].tokens + row - question.start for row in tokens.user_rows)
    queries = seen[0].unflatten(-1, (-1, plain.config.hidden_size // plain.config.num_attention_heads))
    expected = []
    for found in state.matched:
        if found.origin != "reused":
            continue
        assert found.provenance.kind == "similar-10"
        keys = found.kv.kv[-1, 0]  # (G, n, D)
        shared = queries.shape[1] // keys.shape[0]
        products = [queries[first:end, head] @ keys[head // shared].T for head in range(queries.shape[1])]
        expected.append(torch.stack(products).sum(dim=(0, 1)))
    found = scored(state, "fusionrag")
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    assert found.unique().numel() > 1


def test_the_idealised_score_is_what_a_stale_token_adds_to_the_error(adapter, store, prompt, plain):
    state = scene_of(adapter, store, prompt, "idealised")
    tokens, stale = state.request.prompt, state.stale
    with torch.no_grad():
        out = plain(torch.tensor([tokens.token_ids]), output_attentions=True)
    asked = torch.stack([layer[0, :, slice(*tokens.user_rows)] for layer in out.attentions])
    full = of_context(asked, state)
    off = of_context(over_stale(plain, adapter, store, prompt, "idealised"), state)
    values = torch.stack([layer.values[0] for layer in out.past_key_values.layers])  # (L, G, N, D)
    held = prefilled(adapter, store, prompt, "idealised", ratio=0.0).kv_cache.layers
    kept = torch.stack([layer.values[0, :, : tokens.tokens] for layer in held])
    norms = []
    for row in stale.tolist():
        place = row - state.context[0]
        error = full[:, place, None, None] * values[:, :, row] - off[:, place, None, None] * kept[:, :, row]
        norms.append(error.flatten(1).norm(dim=1).mean())
    torch.testing.assert_close(scored(state, "idealised"), torch.stack(norms), atol=1e-6, rtol=1e-3)
