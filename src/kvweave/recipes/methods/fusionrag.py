"""FusionRAG: chunks prepared after similar chunks, and the tokens of each chunk that the question attends to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionProbe, LayerQueries
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Similar
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score, TopScores, question_plan, question_votes


def fusionrag() -> Recipe:
    """Prepare each chunk after the chunks most similar to it; recompute the tokens that the question attends to in each.

    Paper: FusionRAG (arXiv 2601.12904) §3.1 (similarity-guided preprocessing, eq. 10) and §3.2 (query-guided selection).
    Idea: chunks retrieved together are similar, so most of what they tell each other can be computed offline. The last
        layer's attention then shows which tokens of each chunk the question needs.
    Parameters: 10 neighbours, ratio 0.15.
    Differs from the paper: in nothing known, but §3.2 says only that the question is prefilled, and that its last layer's
        queries are multiplied with each chunk's keys and summed. Public code that looks like the authors' runs the question
        over the chunks' KV at true positions, divides products by √d, and takes a softmax for each chunk by itself; so does
        this recipe. Read literally, the text has a question that sees no chunk and scores without positions and softmax:
        that reading is `fusionrag-alone`. Prepared chunks stay when others join; `kvweave cache clear` before the next
        `kvweave add` prepares all of them again.
    Relations: `--prepare similar` gives the first half to any recipe, `--prepare isolated` takes it away;
        `fusionrag-over-stale` takes one softmax over all chunks, so that chunks compete; `prophetkv` does so in every layer.
    """
    return Recipe(
        "fusionrag",
        prepare=Similar(),
        select=TopScores(AttentionInEachChunk()),
        ratio=0.15,
    )


@dataclass(frozen=True, slots=True)
class AttentionInEachChunk(Score):
    """The question's attention to each token, with a softmax for each chunk by itself (FusionRAG §3.2).

    The question is run over the stale KV, every token at its true position. Weights of the rows that the user wrote are
    averaged over rows, heads and layers, which ranks as their sum does. The scores of every chunk sum to 1, whatever the
    question finds there. `layers` are the layers to look at, negative ones from the last. Those count that see the whole
    context from the question (`LayerVotes`).
    """

    layers: tuple[int, ...] = (-1,)
    supports_coverage: ClassVar[bool] = True

    def scores(self, state: PrefillState) -> Tensor:
        """Run one pass of the question and of fresh chunks up to the last of those layers."""
        votes = question_votes(state, self.layers)
        chunks = [(m.span.start, m.span.end) for m in state.matched if m.origin == "reused"]
        probes = [
            AttentionProbe(
                state.question_rows, columns=columns, layers=votes.layers, lift_windows=votes.lift_windows
            )
            for columns in chunks
        ]
        plan = question_plan(state, votes, _Together(probes))
        state.request.adapter.run_partial(state.kv_cache, state.request.prompt.token_ids, plan)
        return torch.cat([probe.weights.mean(dim=0) for probe in probes]).cpu()


@dataclass(frozen=True, slots=True)
class _Together:
    """Shows every layer to several probes."""

    probes: Sequence[AttentionProbe]

    def on_layer(self, queries: LayerQueries) -> None:
        for probe in self.probes:
            probe.on_layer(queries)
