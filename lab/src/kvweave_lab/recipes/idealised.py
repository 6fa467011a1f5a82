"""The idealised selector: it knows full attention, and so where stale KV does harm."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import TopScores, question_probe, question_votes
from kvweave_lab.scores import residual_norms


def idealised() -> Recipe:
    """Recompute the tokens whose staleness, measured against full attention, changes the question's attention most.

    Paper: ProphetKV (arXiv 2602.02579) eq. 5 and App. F.
    Idea: how far selection by this bound could get if its terms were known. It needs a full prefill, so it is for
        evaluation only.
    Parameters: ratio 0.15.
    Differs from the paper: App. F combines attention and values of all layers before applying eq. 5; here eq. 5 is
        applied in every layer, and its norms are averaged.
    Relations: ranks the terms of a bound, not the error itself, so practical recipes may beat it.
    """
    return Recipe("idealised", match=MatchPathThenChunk(), select=TopScores(TrueResidual()), ratio=0.15)


@dataclass(frozen=True, slots=True)
class TrueResidual:
    """What each stale token adds to the bound on the error of the question's attention output (ProphetKV eq. 5).

    ‖Φ(t)V(t) − Φ'(t)V'(t)‖ per layer, attention averaged over the question's rows and heads; mean over the layers that see
    the whole context (`LayerVotes`).
    """

    supports_coverage: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Run a full prefill with its own KV cache, and the question over stale KV."""
        adapter, prompt = state.request.adapter, state.request.prompt
        first, _ = state.context
        votes = question_votes(state)
        full = question_probe(state, votes)
        plan = adapter.rows(torch.arange(prompt.tokens))
        plan.hooks.append(full)
        whole = adapter.new_cache(prompt.tokens)
        adapter.compute(whole, prompt.token_ids, plan)
        stale = question_probe(state, votes)
        adapter.run_partial(state.kv_cache, prompt.token_ids, state.plan(state.fresh, stale))
        rows = state.stale.to(adapter.geometry.device)
        norms = [
            residual_norms(
                full.weights[number, rows - first], whole.layers[layer].values[0][:, rows],
                stale.weights[number, rows - first], stored_values(state, layer).to(rows.device),
            )
            for number, layer in enumerate(votes.layers)
        ]  # fmt: skip
        return torch.stack(norms).mean(dim=0).cpu()


def stored_values(state: PrefillState, layer: int) -> Tensor:
    """Return the values of the stale tokens, (G, n, D)."""
    values = [m.kv.layer(layer)[1] for m in state.matched if m.origin == "reused" and m.kv is not None]
    return torch.cat(values, dim=1)
