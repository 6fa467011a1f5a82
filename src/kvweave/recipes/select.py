"""Slot 4, select: which stale tokens are recomputed, and the score by the question's attention."""

import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import RowPlan
from kvweave.models.hooks import AttentionHook, AttentionProbe, LayerQueries, StopAtLayer
from kvweave.models.support import Geometry
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prefill_state import PrefillState


class Select(Protocol):
    """Chooses stale rows within the budget."""

    @property
    def selective(self) -> bool:
        """Whether it can spend a budget between nothing and everything."""

    @property
    def supports_coverage(self) -> bool:
        """Whether it can spend a coverage budget: its scores are shares of a whole."""

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The chunk features that it reads, extracted at indexing time."""

    def choose(self, state: PrefillState) -> Tensor:
        """Return the prompt positions to recompute: ascending, a subset of `state.stale`, within the request's budget.

        Raises InvalidRequest for a budget that it cannot spend.
        """


class TokenFactor(FeatureExtractor, Protocol):
    """A feature of each token that a score is multiplied with."""

    def of_stale_tokens(self, state: PrefillState) -> Tensor:
        """Return (n,) float32 on the CPU, one for each row of `state.stale`."""


class Score(Protocol):
    """Rates how much recomputing each stale token would help. Inherit from it for its defaults."""

    @property
    def supports_coverage(self) -> bool:
        """Whether scores are shares of a whole, at least 0, so that a share of their sum means something; by default not."""
        return False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The chunk features that it reads; by default none."""
        return ()

    @abstractmethod
    def scores(self, state: PrefillState) -> Tensor:
        """Return (n,) float32 on the CPU, one for each row of `state.stale`; higher is more urgent."""


@dataclass(frozen=True, slots=True)
class SelectNone:
    """Recompute nothing; refuse budgets between nothing and everything where something is stale."""

    selective: ClassVar[bool] = False
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
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
    """The stale tokens with the highest scores, as many as the budget allows; ties go to the earlier token.

    `sampled` is the share of these tokens that are evenly spaced instead, whatever their scores. A coverage budget is spent on scores
    alone, and such tokens come on top.
    """

    score: Score
    sampled: float = 0.0
    selective: ClassVar[bool] = True

    @property
    def supports_coverage(self) -> bool:
        return self.score.supports_coverage

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
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
        state.scores[:] = [scores]
        count = budget.row_count(scores)
        if budget.coverage is not None:
            count = min(math.ceil(count / (1 - self.sampled)), budget.max_rows(stale.numel()))
        sampled = math.ceil(self.sampled * count)
        sample = stale[torch.arange(sampled) * len(stale) // max(1, sampled)]
        state.spaced[:] = [sample]
        left = scores.masked_fill(torch.isin(stale, sample), -math.inf)
        return torch.cat([sample, stale[top_tokens(left, count - sampled)]]).sort().values


# Which layers' attention counts in a score, where some layers see only a sliding window of the context.
#
# A layer with a window pays all its attention to the last tokens before a row. If it counted as much as a layer that sees
# everything, those tokens would win whatever the question is. So a layer counts only if it sees the whole context.


@dataclass(frozen=True, slots=True)
class LayerVotes:
    """The layers that count, ascending.

    With a `lifted_window`, none of them sees the whole context: this is their window in tokens. Their weights then have to be
    computed as if they had none, so that near and far tokens compare.
    """

    layers: tuple[int, ...]
    lifted_window: int | None = None

    @property
    def lift_windows(self) -> bool:
        """Whether weights are computed as if the layers had no window."""
        return self.lifted_window is not None


def voting_layers(
    geometry: Geometry, first: int, last: int, chosen: Collection[int] | None = None
) -> LayerVotes:
    """Return the layers that count when rows up to position `last` attend to keys from position `first` on, as windows count.

    Those that see all of these keys from all rows count. If there are none, those with the widest window count, and it is
    lifted: their queries are multiplied with all keys. `PrefillState.cache_within_window` moves far keys into the
    window for that, since the layer was never trained on larger distances.

    `chosen` are the layers that a method looks at, negative ones from the last; None for all. Those of them that do not count by
    the rule are left out. If that leaves none, each is replaced by the nearest layer that counts, the earlier of two.
    """
    windows = geometry.windows or (None,) * geometry.layers
    # As `ops.attention.visible_keys` counts.
    able = [layer for layer, window in enumerate(windows) if window is None or last - first < window]
    lifted = None
    if not able:
        lifted = max(window for window in windows if window is not None)
        able = [layer for layer, window in enumerate(windows) if window == lifted]
    if chosen is None:
        return LayerVotes(tuple(able), lifted)
    wanted = {range(geometry.layers)[layer] for layer in chosen}
    found = wanted.intersection(able) or {
        min(able, key=lambda other: (abs(other - layer), other)) for layer in wanted
    }
    return LayerVotes(tuple(sorted(found)), lifted)


def last_layer(geometry: Geometry, tokens: int) -> LayerVotes:
    """Return the vote of the last layer whose last row sees all of `tokens` tokens, itself included."""
    return voting_layers(geometry, 0, max(0, tokens - 1), (-1,))


# The question's attention


@dataclass(frozen=True, slots=True)
class QuestionAttention(Score):
    """The question's attention to each token when it is run over the stale KV (ProphetKV §4.2).

    Attention weights of the rows that the user wrote, with a softmax over the context's keys alone, averaged over
    rows, heads and layers. `layers` are the layers to look at, negative ones from the last; None for all. Those count that
    see the whole context (`LayerVotes`). With `times`, each weight is multiplied with that feature of its token.
    """

    layers: tuple[int, ...] | None = None
    times: TokenFactor | None = None
    supports_coverage: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The factor, if there is one."""
        return () if self.times is None else (self.times,)

    def scores(self, state: PrefillState) -> Tensor:
        """Run one pass up to the attention of the last layer that counts.

        It computes chunks without stored KV, and the question up to the last row that the user wrote: later rows do not
        influence the scores.
        """
        first, _ = state.context
        votes = question_votes(state, self.layers)
        probe = question_probe(state, votes)
        plan = question_plan(state, votes, probe)
        state.request.adapter.run_partial(state.kv_cache, state.request.prompt.token_ids, plan)
        attention = probe.weights.mean(dim=0).cpu()[state.stale - first]
        return attention if self.times is None else attention * self.times.of_stale_tokens(state)


def question_votes(state: PrefillState, chosen: Collection[int] | None = None) -> LayerVotes:
    """Return the layers whose attention from the question to the context counts, of the chosen ones or all."""
    geometry, (first, _) = state.request.adapter.geometry, state.context
    return voting_layers(geometry, first, int(state.question_rows[-1]), chosen)


def question_plan(state: PrefillState, votes: LayerVotes, probe: AttentionHook) -> RowPlan:
    """Return the plan of a pass of the question over the stale KV, up to the attention of the last layer that counts.

    Fresh chunks are computed on the way. Where a window is lifted, the probe sees far keys at a distance inside it.
    """
    shown = probe if votes.lifted_window is None else _WithinWindow(state, votes.lifted_window, probe)
    rows = state.fresh[state.fresh <= state.question_rows[-1]]
    return state.plan(rows, shown, StopAtLayer(votes.layers[-1]))


def question_probe(state: PrefillState, votes: LayerVotes) -> AttentionProbe:
    """Return a probe of the question's attention to the context in the layers that count, with a softmax over the context."""
    return AttentionProbe(
        state.question_rows, columns=state.context, layers=votes.layers, lift_windows=votes.lift_windows
    )


class _WithinWindow:
    """Shows a probe the stored keys as `PrefillState.cache_within_window` has them, beside the keys that the pass computes."""

    def __init__(self, state: PrefillState, window: int, probe: AttentionHook) -> None:
        self._kv_cache = state.cache_within_window(window)
        self._probe = probe

    def on_layer(self, queries: LayerQueries) -> None:
        keys = self._kv_cache.layer_kv(queries.layer, queries.keys)[0].clone()
        self._kv_cache.layers[queries.layer].pop_kv()  # no other layer needs the room
        keys[:, :, queries.rows] = queries.keys[:, :, queries.rows]
        self._probe.on_layer(replace(queries, keys=keys))
