"""FusionRAG: chunks prepared behind their like, and tokens selected by the question alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import UnrotatedQueries
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prepare import Similar
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest, QuestionAttention
from kvweave.recipes.state import PrefillState
from kvweave.types import ChunkKV


@dataclass(frozen=True, slots=True)
class QuestionOnItsOwn:
    """Products of the question's queries with each chunk's keys in the last layer, both before rotation (FusionRAG §3.2).

    The question is prefilled behind the system prefix alone. Summed over its rows and heads; no softmax, so scores of
    tokens do not depend on other chunks.
    """

    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """One pass of the question behind the prefix; of the chunks only the last layer's keys are read."""
        asked = self._queries(state)  # (H, R, D)
        last = state.request.adapter.geometry.layers - 1
        found = [
            _products(asked, m.kv, last) for m in state.matched if m.origin == "reused" and m.kv is not None
        ]
        return torch.cat(found).cpu()

    def _queries(self, state: PrefillState) -> Tensor:
        """(H, R, D), float32: the last layer's queries of the rows that the user wrote."""
        adapter, prompt = state.request.adapter, state.request.prompt
        system, question = prompt.spans[0], prompt.spans[-1]
        ids = (*prompt.ids(system), *prompt.ids(question))
        head = state.matched[0].kv
        last = adapter.geometry.layers - 1
        queries = UnrotatedQueries(layers={last})
        known = head.tokens if head is not None else 0
        plan = adapter.rows(torch.arange(known, len(ids)))
        plan.hooks.append(queries)
        kv_cache = adapter.new_cache(len(ids), [PlacedSpan(head, 0, 0)] if head is not None else [])
        adapter.compute(kv_cache, ids, plan)
        places = state.asked - question.start + system.tokens - known
        return queries.of(last)[0][:, places.to(adapter.geometry.device)].float()


def _products(asked: Tensor, kv: ChunkKV, layer: int) -> Tensor:
    """Σ over heads and rows of query · key, (n,)."""
    keys = kv.layer(layer)[0].to(asked.device).float()  # (G, n, D)
    summed = asked.reshape(keys.shape[0], -1, keys.shape[-1]).sum(
        dim=1
    )  # heads that share keys follow each other
    return torch.einsum("gd,gnd->n", summed, keys)


def fusionrag() -> Recipe:
    """Prepare each chunk behind the chunks most similar to it; recompute the tokens that match the question best.

    Paper: FusionRAG §3.1 (similarity-guided preprocessing, eq. 10) and §3.2 (query-guided selection).
    Idea: chunks retrieved together are alike, so most of what they say to each other can be computed offline.
    Parameters: 10 neighbours, ratio 0.15.
    Differs from the paper: nothing known, but it leaves four things open: what the question is prefilled behind, here the
        system prefix; whether queries and keys are rotated, here they are not, as the question has no place among the
        chunks yet; a softmax, which is left out, so that chunks do not compete; and what becomes of prepared chunks when
        others join: they stay, and `kvweave cache clear` before the next `kvweave add` has all of them prepared anew.
    Relations: `--prepare similar` gives the first half to any recipe, `--prepare isolated` takes it away;
        `fusionrag-over-stale` runs the question over the chunks instead.
    Measured: see the methods page.
    """
    return Recipe(
        "fusionrag",
        prepare=Similar(),
        match=MatchPathThenChunk(),
        select=Highest(QuestionOnItsOwn()),
        ratio=0.15,
    )


def over_stale() -> Recipe:
    """FusionRAG with the question run over the stale chunks: the last layer's attention selects.

    Paper: FusionRAG §3.2, read the other way: the question's query matrix may be made with the chunks in front.
    Idea: the question's queries are the better the more of the context they have seen.
    Parameters: 10 neighbours, ratio 0.15.
    Differs from the paper: positions and softmax take part.
    Relations: `prophetkv` with `similar` chunks and one layer instead of all.
    Measured: see the methods page.
    """
    score = QuestionAttention(layers=(-1,))
    return Recipe(
        "fusionrag-over-stale",
        prepare=Similar(),
        match=MatchPathThenChunk(),
        select=Highest(score),
        ratio=0.15,
    )
