"""Answers after the tokens of an idealised selection were recomputed: how far a selection could get (ProphetKV App. F).

Most selections are idealised, because they need a full pass to know their tokens. All tokens are recomputed alike. Cost
does not matter here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.recipe import Recipe, run
from kvweave.recipes.select import TopScores
from kvweave.recipes.state import PrefillState
from kvweave.types import TokenizedPrompt
from kvweave_lab.eval.metrics import METRICS
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.observe import FullView
from kvweave_lab.statistics import kl_divergence

ANSWERED = (
    "optimal",
    "question_stale",
    "question_stale_last",
    "deviation",
    "kvshare",
    "position",
    "random",
)
"""The selections with which prompts are answered."""

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
class KnownScores:
    """Known scores (n,) of the context's tokens, the first token at position `start`."""

    known: Tensor
    start: int
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Return the scores of the stale tokens."""
        return self.known[state.stale - self.start]


def answer_idealised(
    recipe: Recipe,
    adapter: Adapter,
    store: KVStore,
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
        selecting = replace(recipe, select=TopScores(KnownScores(scores, full.context.start)))
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
        return score(decoded.text.strip()), kl_divergence(full.logits, result.logits)

    found = torch.tensor(
        [[attempt(scored[name], ratio) for ratio in ratios] for name in ANSWERED], dtype=torch.float64
    )  # (A, P, 2)
    stale_score, stale_kl = attempt(scored["random"], 0.0)
    text = adapter.tokenizer.decode(full.answer, skip_special_tokens=True).strip()
    return Answered(found[..., 0], found[..., 1], score(text), stale_score, stale_kl)
