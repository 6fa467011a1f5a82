"""Slot 4, select: which stale tokens are recomputed."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.hooks import AttentionProbe, StopAtLayer
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.state import PrefillState


class Select(Protocol):
    """Chooses stale rows within the budget."""

    @property
    def selective(self) -> bool:
        """Whether it can spend a budget between nothing and everything."""
        ...

    @property
    def supports_coverage(self) -> bool:
        """Whether it can spend a coverage budget: its scores are shares of a whole."""
        ...

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The chunk features that it reads, extracted at indexing time."""
        ...

    def choose(self, state: PrefillState) -> Tensor:
        """Return the prompt positions to recompute: ascending, a subset of `state.stale`, within the request's budget.

        Raises InvalidRequest for a budget that it cannot spend.
        """
        ...


class Score(Protocol):
    """Rates how much recomputing each stale token would help."""

    @property
    def supports_coverage(self) -> bool:
        """Whether scores are shares of a whole, at least 0, so that a share of their sum means something."""
        ...

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The chunk features that it reads."""
        ...

    def scores(self, state: PrefillState) -> Tensor:
        """Return (n,) float32 on the CPU, one for each row of `state.stale`; higher is more urgent."""
        ...


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Recompute nothing; refuse budgets between nothing and everything where something is stale."""

    selective: ClassVar[bool] = False
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        """Return no rows."""
        budget = state.request.budget
        if budget.max_rows(state.stale.numel()):
            asked = (
                f"coverage is {budget.coverage}"
                if budget.coverage is not None
                else f"ratio is {budget.ratio}"
            )
            raise InvalidRequest(
                f"{asked}, but this recipe recomputes nothing; use ratio 0, or 1 to compute everything"
            )
        return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class TopScores:
    """The stale tokens with the highest scores, as many as the budget allows; ties go to the earlier token."""

    score: Score
    selective: ClassVar[bool] = True

    @property
    def supports_coverage(self) -> bool:
        """As the score says."""
        return self.score.supports_coverage

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Those of the score."""
        return self.score.extractors

    def choose(self, state: PrefillState) -> Tensor:
        """Rank all stale tokens of the prompt together."""
        budget, stale = state.request.budget, state.stale
        if budget.coverage is not None and not self.supports_coverage:
            raise InvalidRequest(
                f"coverage is {budget.coverage}, but this recipe's scores are no shares of a whole; use a ratio"
            )
        if budget.recomputes_none or not stale.numel():
            return stale[:0]
        scores = self.score.scores(state)
        return stale[top_tokens(scores, budget.row_count(scores))]


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """The question's attention to each token when it is run over the stale KV (ProphetKV §4.2).

    Attention weights of the rows that the user wrote, with a softmax over the context's keys alone, averaged over
    rows, heads and layers. `layers` are the layers that count, negative ones from the last; None for all.
    """

    layers: tuple[int, ...] | None = None
    supports_coverage: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Run one pass up to the attention of the last layer that counts.

        It computes chunks without stored KV, and the question up to the last row that the user wrote: later rows do not
        influence the scores.
        """
        first, _ = state.context
        all_layers = range(state.request.adapter.geometry.layers)
        layers = {all_layers[layer] for layer in self.layers or all_layers}
        probe = AttentionProbe(state.question_rows, columns=state.context, layers=layers)
        rows = state.fresh[state.fresh <= state.question_rows[-1]]
        state.run_partial(rows, probe, StopAtLayer(max(layers)))
        return probe.weights.mean(dim=0).cpu()[state.stale - first]
