"""Answers after the tokens of an idealised selection were recomputed: is what scores well worth recomputing?

Idealised, because most selections need a full pass to know their tokens; all are recomputed alike (ProphetKV
App. F). The question is how far a selection could get, not what it would cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import Highest
from kvweave.recipes.state import PrefillState
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.divergence import divergence
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.observe import FullView

ANSWERED = (
    "optimal",
    "question_stale",
    "question_stale_last",
    "deviation",
    "kvshare",
    "position",
    "random",
)
"""The selections that prompts are answered with."""

_GREEDY = GenerationConfig(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answers; A selections as ANSWERED, P ratios.

    Attributes:
        score: (A, P) by the sample's metric, 0..1.
        kl: (A, P) divergence of the first token's distribution from full attention's, in nats.
        full_score: under full attention.
        stale_score: with nothing recomputed.
        stale_kl: with nothing recomputed.
    """

    score: Tensor
    kl: Tensor
    full_score: float
    stale_score: float
    stale_kl: float


@dataclass(frozen=True, slots=True)
class Given:
    """Scores (n,) of the context's tokens that somebody has worked out already, the first token at `start`."""

    known: Tensor
    start: int
    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Those of the stale tokens."""
        return self.known[state.stale - self.start]


def answer_idealised(
    recipe: Recipe,
    adapter: Adapter,
    store: ChunkStore,
    prompt: TokenizedPrompt,
    sample: Sample,
    full: FullView,
    scored: Mapping[str, Tensor],
    ratios: Sequence[float],
) -> Answered:
    """Answer a prompt over the recipe's KV, which the store holds, once for each selection and ratio."""

    def score(text: str) -> float:
        return METRICS[sample.metric](text, sample.answers)

    def attempt(scores: Tensor, ratio: float) -> tuple[float, float]:
        selecting = replace(recipe, select=Highest(Given(scores, full.context.start)))
        result = run(selecting, adapter, store, prompt, ratio=ratio)
        decoded = Decoded()
        for _ in generate(
            adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            _GREEDY,
            sample.max_new_tokens,
            decoded,
        ):
            pass
        return score(decoded.text.strip()), divergence(full.logits, result.logits)

    found = torch.tensor(
        [[attempt(scored[name], ratio) for ratio in ratios] for name in ANSWERED], dtype=torch.float64
    )  # (A, P, 2)
    stale_score, stale_kl = attempt(scored["random"], 0.0)
    text = adapter.tokenizer.decode(full.answer, skip_special_tokens=True).strip()
    return Answered(found[..., 0], found[..., 1], score(text), stale_score, stale_kl)
