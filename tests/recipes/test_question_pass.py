"""The pass for the question's attention: which rows it computes, compared with a pass over all fresh rows."""

import torch

from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.place import Causal
from kvweave.recipes.prefill_state import PrefillState, rows_of
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.recipes.select import QuestionAttention
from kvweave.types import Prompt

CHUNKS = ("the sky was sunny that morning", "Aaron lives in Berlin and reads", "Paris has a room number")


def placed_state(adapter, store) -> PrefillState:
    """The placed prompt of three chunks, two of them stored, with nothing computed yet."""
    recipe = recipe_named("prophetkv")
    prepare(adapter, store, CHUNKS[:2], recipe=recipe)  # the last one has no KV
    tokens = adapter.template.render(Prompt("Where does Aaron live?", CHUNKS))
    request = PrefillRequest(adapter, store, tokens, Budget(0.5))
    matched = recipe.match.find(request, recipe.prepare)
    spans = recipe.place.place(request, matched).spans
    assert all(isinstance(span, PlacedSpan) for span in spans)
    return PrefillState(request, adapter.new_cache(tokens.tokens, spans), matched, Causal())


def test_rows_after_the_users_last_word_are_not_computed_and_change_no_score(adapter, store):
    state, other = placed_state(adapter, store), placed_state(adapter, store)
    seen = []
    hook = adapter.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: seen.append(given[0].shape[1])
    )
    scores = QuestionAttention().scores(state)
    hook.remove()
    start, end = state.request.prompt.user_rows
    assert start < end < state.request.prompt.tokens  # the template continues after the question
    chunk = rows_of([state.matched[3].span])
    assert state.matched[3].origin == "fresh"
    assert seen == [chunk.numel() + end - state.request.prompt.spans[-1].start]

    probe = AttentionProbe(torch.arange(start, end), columns=other.context)
    adapter.run_partial(other.kv_cache, other.request.prompt.token_ids, other.plan(other.fresh, probe))
    expected = probe.weights.mean(dim=0)[other.stale - other.context[0]]
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
