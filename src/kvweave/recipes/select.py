"""Slot 4, select: which stale tokens are computed again."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.hooks import AttentionProbe
from kvweave.models.partial_layers import StopAtLayer
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.state import PrefillState


class Select(Protocol):
    """Chooses rows within the budget, from stale rows only."""

    @property
    def selects(self) -> bool:
        """Whether budgets between nothing and everything mean anything to it."""
        ...

    @property
    def adds_up(self) -> bool:
        """Whether it can spend a coverage: its scores are shares of a whole."""
        ...

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """What it needs recorded about every chunk beside its KV, made at indexing time."""
        ...

    def choose(self, state: PrefillState) -> Tensor:
        """Prompt positions to recompute: ascending, a subset of `state.stale`, within the request's budget.

        Raises InvalidRequest for a budget that the selector cannot spend.
        """
        ...


class Score(Protocol):
    """How much is gained by recomputing each stale token."""

    @property
    def adds_up(self) -> bool:
        """Whether scores are shares of a whole, at least 0, so that a coverage of their sum means something."""
        ...

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """As a selector's."""
        ...

    def scores(self, state: PrefillState) -> Tensor:
        """(n,) float32 on the CPU, one for each of `state.stale`; higher is more urgent."""
        ...


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Nothing is recomputed; where something is stale, a budget between nothing and everything is refused."""

    selects: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        """No rows."""
        budget = state.request.budget
        if budget.rows(state.stale.numel()):
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
class Highest:
    """The stale tokens with the highest scores, as many as the budget allows; ties go to the earlier token."""

    score: Score
    selects: ClassVar[bool] = True

    @property
    def adds_up(self) -> bool:
        """As the scores do."""
        return self.score.adds_up

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Those of the score."""
        return self.score.extractors

    def choose(self, state: PrefillState) -> Tensor:
        """Rank all stale tokens of the prompt together."""
        budget, stale = state.request.budget, state.stale
        if budget.coverage is not None and not self.adds_up:
            raise InvalidRequest(
                f"coverage is {budget.coverage}, but this recipe's scores are no shares of a whole; use a ratio"
            )
        if budget.nothing or not stale.numel():
            return stale[:0]
        scores = self.score.scores(state)
        return stale[top_tokens(scores, budget.spend(scores))]


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """How much the question attends to each token when it is run over the stale KV (ProphetKV §4.2).

    Attention weights of the rows that the user wrote, with a softmax over the context's keys alone, averaged over
    rows, heads and layers. `layers` are those that count, negative ones from the last, None for all.
    """

    layers: tuple[int, ...] | None = None
    adds_up: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """One pass up to the attention of the last layer that counts.

        Of the question up to the last row that the user wrote, on which no later row bears, and of chunks without
        stored KV.
        """
        first, _ = state.context
        all_layers = range(state.request.adapter.geometry.layers)
        layers = {all_layers[layer] for layer in self.layers or all_layers}
        probe = AttentionProbe(state.asked, columns=state.context, layers=layers)
        rows = state.fresh[state.fresh <= state.asked[-1]]
        state.look(rows, probe, StopAtLayer(max(layers)))
        return probe.weights.mean(dim=0).cpu()[state.stale - first]
