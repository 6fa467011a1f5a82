"""PerCache: exact paths with their queries; stored tokens run through all layers and only their projections are left out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.attention import AttentionHook
from kvweave.models.hooks import UnrotatedQueries
from kvweave.recipes.match import MatchExactPathWithQueries
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.state import PrefillState


@dataclass(frozen=True, slots=True)
class AllRowsSomeProjected:
    """All rows of the prompt through all layers, of which those that are to be computed are projected (PerCache §4.2.2).

    What is captured has its queries with it. Where the model cannot project some rows alone, those run alone.
    """

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """One pass; watches see every row of the prompt."""
        adapter, prompt, kv_cache = state.request.adapter, state.request.prompt, state.kv_cache
        if adapter.projections is None:
            return state.run(rows, *hooks, capture=capture)
        layers = range(adapter.geometry.layers)
        queries = UnrotatedQueries(layers)
        plan = state.plan(torch.arange(prompt.tokens), *hooks, *([queries] if capture else []))
        projected = rows if rows.numel() < prompt.tokens else None
        logits = adapter.compute(kv_cache, prompt.token_ids, plan, capture=capture, projected=projected)
        if capture:
            assert kv_cache.capture is not None
            kv_cache.capture.queries = torch.cat([queries.of(layer) for layer in layers])  # (L, H, N, D)
        return logits


def percache() -> Recipe:
    """Reuse the projections of what was computed behind exactly the same earlier text, and compute all the rest of it again.

    Paper: PerCache §4.2.2, App. B.1.
    Idea: entries hold queries beside keys and values. Every row of the prompt runs through every layer, and for stored
        tokens the three projections are left out: stored queries, keys and values, rotated to where they stand, take their
        place.
    Parameters: none.
    Differs from the paper: nodes are keyed as those of `prefix`. Where a family has other modules than q_proj, k_proj and
        v_proj (Phi-3, GPT-NeoX), or layers that turn a part of each head or none (Phi, Cohere 2), this is `prefix`: KV
        without queries, whose rows are not run.
    Relations: exact, as `prefix` is, which saves all that this saves and attention and feed-forward besides, and stores less:
        what is computed of stored tokens here reaches no logits, since theirs are the stored keys and values. The two do not
        find each other's entries. Here to be compared with, not to be used.
    Measured: only priced, in lab/docs/personas.md.
    """
    return Recipe(
        "percache",
        prepare=NotPrepared(),
        match=MatchExactPathWithQueries(),
        recompute=AllRowsSomeProjected(),
    )
