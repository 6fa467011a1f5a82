"""EPIC, FusionRAG and ProphetKV against their definitions, by the library's own attention."""

import math

import pytest
import torch
from contract import context_shares, eager_model, prefilled, prepare, question_attention, state_of

from kvweave.recipes.methods import recipe_named


@pytest.fixture(scope="module")
def plain():
    return eager_model()


def prepared_state(adapter, store, prompt, name):
    prepare(adapter, store, prompt, name)
    return state_of(adapter, store, prompt, name)


def scored(state, name):
    return recipe_named(name).select.score.scores(state)


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


def test_prophetkv_uses_all_layers_without_prefix_and_question(adapter, store, prompt, plain):
    state = prepared_state(adapter, store, prompt, "prophetkv")
    attended = context_shares(question_attention(plain, adapter, store, prompt, "prophetkv"), state)
    expected = attended.mean(dim=0)[state.stale - state.context[0]]
    torch.testing.assert_close(scored(state, "prophetkv"), expected, atol=1e-6, rtol=1e-4)


def test_fusionrag_over_stale_uses_the_last_layer(adapter, store, prompt, plain):
    state = prepared_state(adapter, store, prompt, "fusionrag-over-stale")
    attended = context_shares(
        question_attention(plain, adapter, store, prompt, "fusionrag-over-stale"), state
    )
    expected = attended[-1][state.stale - state.context[0]]
    torch.testing.assert_close(scored(state, "fusionrag-over-stale"), expected, atol=1e-6, rtol=1e-4)


def test_fusionrag_multiplies_unrotated_queries_and_keys(adapter, store, prompt, plain):
    state = prepared_state(adapter, store, prompt, "fusionrag")
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
