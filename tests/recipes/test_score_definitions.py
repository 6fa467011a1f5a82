"""EPIC, FusionRAG and ProphetKV against their definitions, by the library's own attention."""

import math

import pytest
import torch

from kvweave.recipes.methods import recipe_named
from support.contract import context_shares, eager_model, prefilled, prepare, question_attention, state_of


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


def test_fusionrag_takes_a_softmax_for_each_chunk_in_the_last_layer(adapter, store, prompt, plain):
    state = prepared_state(adapter, store, prompt, "fusionrag")
    attended = question_attention(plain, adapter, store, prompt, "fusionrag")[-1]  # (H, rows, N)
    expected, stale = [], [found for found in state.matched if found.origin == "reused"]
    assert len(stale) > 1
    for found in stale:
        assert found.provenance.kind == "similar-10"
        inside = attended[..., found.span.start : found.span.end]
        expected.append((inside / inside.sum(dim=-1, keepdim=True)).mean(dim=(0, 1)))
    found = scored(state, "fusionrag")
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-6, rtol=1e-4)
    assert float(found.sum()) == pytest.approx(len(stale))
