"""Two other readings of FusionRAG §3.2: a question that sees no chunk, and one softmax over all chunks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import LayerQueries, StopAtLayer
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Similar
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import QuestionAttention, TopScores, question_votes
from kvweave.types import ChunkKV


def alone() -> Recipe:
    """FusionRAG with a question that is prefilled alone: plain products of its queries with each chunk's keys.

    Paper: FusionRAG (arXiv 2601.12904) §3.2, read literally.
    Idea: a token's score then depends neither on its position nor on other chunks, as §3.2 says of it.
    Parameters: 10 neighbours, ratio 0.15.
    Differs from the paper: in nothing known. The question is prefilled after the system prefix. Queries and keys are not
        rotated, as the question has no place among the chunks yet. There is no scale and no softmax.
    Relations: `fusionrag` runs the question over the chunks and takes a softmax for each, as public code does that looks
        like the authors'.
    """
    return Recipe(
        "fusionrag-alone",
        prepare=Similar(),
        match=MatchPathThenChunk(),
        select=TopScores(IsolatedQuestionProducts()),
        ratio=0.15,
    )


def over_stale() -> Recipe:
    """FusionRAG with one softmax over all chunks: the last layer's attention to the whole context selects.

    Paper: FusionRAG (arXiv 2601.12904) §3.2, read in another way: attention weights are those that the model itself would give.
    Idea: a chunk that the question does not need loses its tokens to the others.
    Parameters: 10 neighbours, ratio 0.15.
    Differs from the paper: chunks compete for the question's attention.
    Relations: `fusionrag` takes a softmax for each chunk by itself; `prophetkv` with `similar` chunks counts all layers.
    """
    return Recipe(
        "fusionrag-over-stale",
        prepare=Similar(),
        match=MatchPathThenChunk(),
        select=TopScores(QuestionAttention(layers=(-1,))),
        ratio=0.15,
    )


@dataclass(frozen=True, slots=True)
class IsolatedQuestionProducts:
    """Products of the question's queries with each chunk's keys in the last layer, both before rotation (FusionRAG §3.2).

    The last layer is the last one that sees the whole context from the question (`LayerVotes`). The question is
    prefilled after the system prefix alone. Products are summed over its rows and heads. Without a
    softmax, the scores of a chunk do not depend on other chunks.
    """

    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Run one pass of the question after the prefix up to that layer; of the chunks read only its keys."""
        (layer,) = question_votes(state, (-1,)).layers
        queries = self._queries(state, layer)  # (H, R, D)
        found = [
            _products(queries, m.kv, layer)
            for m in state.matched
            if m.origin == "reused" and m.kv is not None
        ]
        return torch.cat(found).cpu()

    def _queries(self, state: PrefillState, layer: int) -> Tensor:
        """Return (H, R, D), float32: a layer's queries of the rows that the user wrote."""
        adapter, prompt = state.request.adapter, state.request.prompt
        system, question = prompt.spans[0], prompt.spans[-1]
        ids = (*prompt.ids(system), *prompt.ids(question))
        prefix = state.matched[0].kv
        queries = _Queries(layer)
        known = prefix.tokens if prefix is not None else 0
        plan = adapter.rows(torch.arange(known, len(ids)))
        plan.hooks += [queries, StopAtLayer(layer)]
        kv_cache = adapter.new_cache(len(ids), [PlacedSpan(prefix, 0, 0)] if prefix is not None else [])
        adapter.run_partial(kv_cache, ids, plan)
        places = state.question_rows - question.start + system.tokens - known
        # Rotated backwards, they are what they were before their rotation, but for a factor that all of them share.
        angles = adapter.rotation.angles(-plan.rows, len(ids), queries.found)
        return angles.rotate(layer, queries.found)[0][:, places.to(adapter.geometry.device)].float()


class _Queries:
    """Keeps the queries of one layer, (1, H, T, D)."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.found = torch.empty(0)

    def on_layer(self, queries: LayerQueries) -> None:
        if queries.layer == self._layer:
            self.found = queries.query


def _products(queries: Tensor, kv: ChunkKV, layer: int) -> Tensor:
    """Return Σ over heads and rows of query · key, (n,)."""
    keys = kv.layer(layer)[0].to(queries.device).float()  # (G, n, D)
    # Heads that share keys follow each other.
    summed = queries.reshape(keys.shape[0], -1, keys.shape[-1]).sum(dim=1)  # (G, D)
    return torch.einsum("gd,gnd->n", summed, keys)
