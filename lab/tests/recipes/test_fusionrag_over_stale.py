"""FusionRAG with one softmax over all chunks, against its definition by the library's own attention."""

import torch

from kvweave.recipes.methods import recipe_named
from support.contract import context_shares, eager_model, prepare, question_attention, state_of

NAME = "fusionrag-over-stale"


def test_it_uses_the_last_layer_and_chunks_compete(adapter, store, prompt):
    prepare(adapter, store, prompt, NAME)
    state = state_of(adapter, store, prompt, NAME)
    attended = context_shares(question_attention(eager_model(), adapter, store, prompt, NAME), state)
    found = recipe_named(NAME).select.score.scores(state)
    expected = attended[-1][state.stale - state.context[0]]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    alone = recipe_named("fusionrag").select.score.scores(state)
    assert not torch.equal(found.argsort(), alone.argsort())
