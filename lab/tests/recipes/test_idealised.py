"""The idealised selection against its definition, by the library's own attention."""

import torch

from kvweave.recipes.methods import recipe_named
from support.contract import context_shares, eager_model, prefilled, prepare, question_attention, state_of


def test_the_idealised_score_is_the_error_that_a_stale_token_adds(adapter, store, prompt):
    plain = eager_model()
    prepare(adapter, store, prompt, "idealised")
    state = state_of(adapter, store, prompt, "idealised")
    tokens, stale = state.request.prompt, state.stale
    with torch.no_grad():
        out = plain(torch.tensor([tokens.token_ids]), output_attentions=True)
    asked = torch.stack([layer[0, :, slice(*tokens.user_rows)] for layer in out.attentions])
    full = context_shares(asked, state)
    off = context_shares(question_attention(plain, adapter, store, prompt, "idealised"), state)
    values = torch.stack([layer.values[0] for layer in out.past_key_values.layers])  # (L, G, N, D)
    held = prefilled(adapter, store, prompt, "idealised", ratio=0.0).kv_cache.layers
    kept = torch.stack([layer.values[0, :, : tokens.tokens] for layer in held])
    norms = []
    for row in stale.tolist():
        place = row - state.context[0]
        error = full[:, place, None, None] * values[:, :, row] - off[:, place, None, None] * kept[:, :, row]
        norms.append(error.flatten(1).norm(dim=1).mean())
    torch.testing.assert_close(
        recipe_named("idealised").select.score.scores(state), torch.stack(norms), atol=1e-6, rtol=1e-3
    )
