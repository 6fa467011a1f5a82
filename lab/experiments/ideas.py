"""Ideas for selectors and preparations, tried on the split `dev`; lab/docs/experiments.md has the results.

.venv/bin/python lab/experiments/experiments.py lab/experiments/ideas.py …
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.models.hooks import AttentionHook, AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.methods.weave import ContextSensitivity, SimilarAndPrevious
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Isolated, Prepare, Previous, Similar
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import QuestionAttention, Score, TopScores


def lengths(state: PrefillState) -> list[int]:
    """Return the number of tokens of every stale chunk."""
    return [matched.span.tokens for matched in state.matched if matched.origin == "reused"]


def _run_partial(state: PrefillState, rows: Tensor, *probes: AttentionHook) -> None:
    """Run rows of the prompt for what probes see."""
    plan = state.plan(rows, *probes)
    state.request.adapter.run_partial(state.kv_cache, state.request.prompt.token_ids, plan)


@dataclass(frozen=True, slots=True)
class Rescored:
    """What changes the scores of another selector; features are the other one's."""

    inner: Score
    supports_coverage: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors


@dataclass(frozen=True, slots=True)
class Spread(Rescored):
    """Gives a token the largest score within `reach` tokens of its chunk, decayed with distance."""

    reach: int = 4
    decay: float = 0.9

    def scores(self, state: PrefillState) -> Tensor:
        parts = self.inner.scores(state).split(lengths(state))
        return torch.cat([self._spread(part) for part in parts])

    def _spread(self, part: Tensor) -> Tensor:
        padded = F.pad(part, (self.reach, self.reach))
        shifted = padded.unfold(0, 2 * self.reach + 1, 1)  # (n, 2 reach + 1)
        weights = self.decay ** torch.arange(-self.reach, self.reach + 1).abs().float()
        return (shifted * weights).amax(dim=1)


@dataclass(frozen=True, slots=True)
class Windowed(Rescored):
    """Gives the tokens of a window its mean or largest score; a token's own score decides within it."""

    window: int = 8
    by: str = "mean"

    def scores(self, state: PrefillState) -> Tensor:
        parts = self.inner.scores(state).split(lengths(state))
        return torch.cat([self._shared(part) for part in parts])

    def _shared(self, part: Tensor) -> Tensor:
        pieces = part.split(self.window)
        shared = [(piece.mean() if self.by == "mean" else piece.max()).expand(len(piece)) for piece in pieces]
        return torch.cat(shared) + 1e-3 * part


@dataclass(frozen=True, slots=True)
class Sentences(Rescored):
    """Gives the tokens of a sentence the sum, mean or largest of its scores."""

    by: str = "mean"

    def scores(self, state: PrefillState) -> Tensor:
        scores = self.inner.scores(state)
        prompt, template = state.request.prompt, state.request.adapter.template
        number, numbers = 0, []
        for matched in state.matched:
            if matched.origin != "reused":
                continue
            number += 1
            for token in prompt.ids(matched.span):
                numbers.append(number)
                if template.decode((token,)).rstrip().endswith((".", "!", "?")):
                    number += 1
        index = torch.tensor(numbers)
        size = torch.bincount(index).float()
        total = torch.zeros(len(size)).index_add_(0, index, scores)
        if self.by == "max":
            total = torch.zeros(len(size)).scatter_reduce_(0, index, scores, "amax")
        elif self.by == "mean":
            total = total / size.clamp(min=1)
        return total[index] + 1e-3 * scores


@dataclass(frozen=True, slots=True)
class TimesValueNorm:
    """The question's attention to a token times the norm of its value, averaged over layers."""

    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        first, end = state.context
        probe = AttentionProbe(state.question_rows, columns=state.context)
        _run_partial(state, state.fresh, probe)
        norms = torch.stack(
            [
                layer.values[0, :, first:end].float().square().sum(dim=(0, 2)).sqrt()
                for layer in state.kv_cache.layers
            ]
        )
        return (probe.weights * norms).mean(dim=0).cpu()[state.stale - first]


@dataclass(frozen=True, slots=True)
class LayerWeighted:
    """The question's attention in some layers; with `peaks`, each layer is divided by its largest weight."""

    layers: tuple[int, ...] | None = None
    peaks: bool = False
    power: float = 1.0
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        first, _ = state.context
        probe = AttentionProbe(state.question_rows, columns=state.context)
        _run_partial(state, state.fresh, probe)
        weights = probe.weights.cpu()
        if self.layers is not None:
            weights = weights[list(self.layers)]
        weights = weights[:, state.stale - first]
        if self.peaks:
            weights = weights / weights.amax(dim=1, keepdim=True).clamp(min=1e-9)
        return weights.pow(self.power).mean(dim=0)


@dataclass(frozen=True, slots=True)
class TimesSensitivity:
    """Another score times each token's sensitivity to its context; `floor` is added to the sensitivity."""

    inner: Score
    sensitivity: ContextSensitivity
    floor: float = 0.0
    added: float = 0.0
    power: float = 1.0
    supports_coverage: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return (self.sensitivity,)

    def scores(self, state: PrefillState) -> Tensor:
        sensitivity = self.sensitivity.of_stale_tokens(state).pow(self.power)
        scores = self.inner.scores(state)
        return scores * (self.floor + sensitivity) + self.added * sensitivity * scores.mean()


@dataclass(frozen=True, slots=True)
class TwoRounds:
    """Selects a part of the budget by the question's attention over stale KV, and the rest after recomputing that part.

    `following` weighs the recomputed tokens' own attention in the second round.
    """

    score: Score = field(default_factory=QuestionAttention)
    share: float = 0.5
    following: float = 0.0
    spread: int = 0
    selective: ClassVar[bool] = True
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        budget, stale = state.request.budget, state.stale
        if budget.recomputes_none or not stale.numel():
            return stale[:0]
        count = budget.max_rows(stale.numel())
        first = top_tokens(self.score.scores(state), max(1, round(self.share * count)))
        probes = [AttentionProbe(state.question_rows, columns=state.context)]
        if self.following:
            probes.append(AttentionProbe(stale[first], columns=state.context))
        _run_partial(state, torch.cat([stale[first], state.fresh]).sort().values, *probes)
        start = state.context[0]
        second = probes[0].weights.mean(dim=0).cpu()[stale - start]
        if self.following:
            second = second + self.following * probes[1].weights.mean(dim=0).cpu()[stale - start]
        if self.spread:
            second = torch.cat(
                [Spread(self.score, self.spread)._spread(part) for part in second.split(lengths(state))]
            )
        second[first] = float("inf")
        return stale[top_tokens(second, count)]


@dataclass(frozen=True, slots=True)
class ChunkStarts(Rescored):
    """Multiplies the scores of the first `tokens` tokens of every chunk by `factor`."""

    tokens: int = 8
    factor: float = 2.0

    def scores(self, state: PrefillState) -> Tensor:
        scores = self.inner.scores(state)
        offsets = torch.cat([torch.arange(size) for size in lengths(state)])
        return torch.where(offsets < self.tokens, scores * self.factor, scores)


def _variant(name: str, prepare: Prepare, score: Score) -> tuple[str, Recipe]:
    return name, Recipe(name, prepare=prepare, match=MatchPathThenChunk(), select=TopScores(score), ratio=0.1)


QUESTION = QuestionAttention()

VARIANTS: Mapping[str, Recipe] = dict(
    [
        _variant("q", Isolated(), QUESTION),
        _variant("q-following", Previous(), QUESTION),
        _variant("q-similar", Similar(), QUESTION),
        _variant("q-woven", SimilarAndPrevious(), QUESTION),
        _variant("q-woven-4", SimilarAndPrevious(4), QUESTION),
        _variant("q-spread2", Previous(), Spread(QUESTION, 2)),
        _variant("q-spread4", Previous(), Spread(QUESTION, 4)),
        _variant("q-sentences-max", Previous(), Sentences(QUESTION, "max")),
        _variant("q-sentences-mean", Previous(), Sentences(QUESTION, "mean")),
        _variant("q-windows-mean", Previous(), Windowed(QUESTION, 8, "mean")),
        _variant("q-value", Previous(), TimesValueNorm()),
        _variant("q-peaks", Previous(), LayerWeighted(peaks=True)),
        _variant("q-root", Previous(), LayerWeighted(power=0.5)),
        _variant("q-moved", Previous(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()))),
        _variant("q-seams", Previous(), ChunkStarts(QUESTION)),
        _variant(
            "q-moved-woven", SimilarAndPrevious(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()))
        ),
        _variant(
            "q-moved-by-following", Previous(), TimesSensitivity(QUESTION, ContextSensitivity(Previous()))
        ),
        _variant(
            "q-moved-by-woven",
            Previous(),
            TimesSensitivity(QUESTION, ContextSensitivity(SimilarAndPrevious())),
        ),
        _variant(
            "q-moved-root", Previous(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()), power=0.5)
        ),
        _variant(
            "q-moved-square", Previous(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()), power=2.0)
        ),
        _variant(
            "q-moved-added", Previous(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()), added=1.0)
        ),
        _variant(
            "q-moved-peaks",
            Previous(),
            TimesSensitivity(LayerWeighted(peaks=True), ContextSensitivity(Similar())),
        ),
        _variant(
            "q-moved-last",
            Previous(),
            TimesSensitivity(QuestionAttention(layers=(-4, -3, -2, -1)), ContextSensitivity(Similar())),
        ),
        _variant("q-moved-isolated", Isolated(), TimesSensitivity(QUESTION, ContextSensitivity(Similar()))),
        (
            "two-rounds",
            Recipe(
                "two-rounds", prepare=Previous(), match=MatchPathThenChunk(), select=TwoRounds(), ratio=0.1
            ),
        ),
        (
            "two-rounds-follow",
            Recipe(
                "two-rounds-follow",
                prepare=Previous(),
                match=MatchPathThenChunk(),
                select=TwoRounds(following=1.0),
                ratio=0.1,
            ),
        ),
    ]
)
