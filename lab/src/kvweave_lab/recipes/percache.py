"""PerCache: exact paths with their queries; stored tokens run through all layers, only their projections are skipped."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionHook, UnrotatedQueries
from kvweave.recipes.match import MatchExactPathWithQueries
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.recompute import SelectedRows


def percache() -> Recipe:
    """Reuse the projections of what was computed after exactly the same earlier text, and compute everything else again.

    Paper: PerCache (arXiv 2601.11553) §4.2.2, App. B.1.
    Idea: entries hold queries beside keys and values. Every row of the prompt runs through every layer. Stored tokens skip
        the three projections: their stored queries, keys and values, rotated to their positions, are used instead.
    Parameters: none.
    Differs from the paper: nodes are keyed as those of `prefix`. It works as `prefix` where a family has other modules than
        q_proj, k_proj and v_proj (Phi-3, GPT-NeoX), or layers that rotate a part of each head or none (Phi, Cohere 2): KV is
        stored without queries, and stored rows do not run.
    Relations: exact, as `prefix` is, which saves the same and attention and feed-forward besides, and stores less: what is
        computed of stored tokens here reaches no logits, since these depend on the stored keys and values. The two do not
        find each other's entries. It is here to be compared with, not to be used.
    """
    return Recipe(
        "percache",
        prepare=NotPrepared(),
        match=MatchExactPathWithQueries(),
        recompute=AllRowsSomeProjected(),
    )


@dataclass(frozen=True, slots=True)
class AllRowsSomeProjected:
    """All rows of the prompt through all layers; only the rows to compute are projected (PerCache §4.2.2).

    Captured KV includes queries. If the model cannot project some rows alone, only the rows to compute run.
    """

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Run one pass, in which hooks see every row of the prompt."""
        adapter, prompt, kv_cache = state.request.adapter, state.request.prompt, state.kv_cache
        if adapter.projections is None:
            return SelectedRows().run(state, rows, hooks, capture=capture)
        layers = range(adapter.geometry.layers)
        queries = UnrotatedQueries(layers)
        plan = state.plan(torch.arange(prompt.tokens), *hooks, *([queries] if capture else []))
        projected = rows if rows.numel() < prompt.tokens else None
        logits = adapter.compute(kv_cache, prompt.token_ids, plan, capture=capture, projected=projected)
        if capture:
            assert kv_cache.capture is not None
            kv_cache.capture.queries = torch.cat([queries.of(layer) for layer in layers])  # (L, H, N, D)
        return logits
