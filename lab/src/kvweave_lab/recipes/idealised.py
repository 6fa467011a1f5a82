"""The idealised selector: knows full attention, and so where stale KV hurts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionProbe
from kvweave.ops.scores import residual_norms
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState


@dataclass(frozen=True, slots=True)
class TrueResidual:
    """What each token, left stale, adds to the bound on the error of the question's attention output (ProphetKV eq. 5).

    ‖Φ(t)V(t) − Φ'(t)V'(t)‖ per layer, attention averaged over the question's rows and heads; mean over layers.
    """

    adds_up: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """A full prefill on a canvas of its own, and the question over stale KV."""
        adapter, prompt = state.request.adapter, state.request.prompt
        first, _ = state.context
        full = AttentionProbe(state.asked, columns=state.context)
        plan = adapter.rows(torch.arange(prompt.tokens))
        plan.hooks.append(full)
        whole = adapter.new_cache(prompt.tokens)
        adapter.compute(whole, prompt.token_ids, plan)
        stale = AttentionProbe(state.asked, columns=state.context)
        state.run(state.fresh, stale)
        rows = state.stale.to(adapter.geometry.device)
        norms = [
            residual_norms(
                full.weights[layer, rows - first], whole.layers[layer].values[0][:, rows],
                stale.weights[layer, rows - first], _stored_values(state, layer).to(rows.device),
            )
            for layer in range(adapter.geometry.layers)
        ]  # fmt: skip
        return torch.stack(norms).mean(dim=0).cpu()


def _stored_values(state: PrefillState, layer: int) -> Tensor:
    """Of the stale tokens, (G, n, D)."""
    kept = [m.kv.layer(layer)[1] for m in state.matched if m.origin == "reused" and m.kv is not None]
    return torch.cat(kept, dim=1)


def idealised() -> Recipe:
    """Recompute the tokens whose staleness, measured against full attention, changes the question's attention most.

    Paper: ProphetKV eq. 5 and App. F.
    Idea: how far selection by this bound could get if its terms were known; it needs a full prefill, so it is for
        evaluation only.
    Parameters: ratio 0.15.
    Differs from the paper: App. F brings attention and values of all layers together before eq. 5 is taken; here eq. 5 is
        taken in every layer, and its norms are averaged.
    Relations: ranks the terms of a bound, not the error itself, so practical recipes may beat it.
    Measured: see the methods page.
    """
    return Recipe("idealised", match=MatchPathThenChunk(), select=Highest(TrueResidual()), ratio=0.15)
