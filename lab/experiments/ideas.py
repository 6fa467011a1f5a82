"""Ideas for a selector and a preparation, tried on the split `dev`; what came of them stands in lab/docs/experiments.md.

    .venv/bin/python lab/experiments/experiments.py lab/experiments/ideas.py …

Knows how each idea works, not whether it pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from kvweave.models.hooks import AttentionProbe
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import ContextSensitivity, FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prepare import Isolated, Prepare, Previous, Similar, SimilarAndPrevious
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest, QuestionAttention, Score
from kvweave.recipes.state import PrefillState


def lengths(state: PrefillState) -> list[int]:
    """Tokens of every stale chunk."""
    return [m.span.tokens for m in state.matched if m.origin == "reused"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A token counts as much as the best of its neighbours within `reach` tokens of the same chunk, a little less."""

    inner: Score
    reach: int = 4
    fading: float = 0.9
    adds_up: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors

    def scores(self, state: PrefillState) -> Tensor:
        parts = self.inner.scores(state).split(lengths(state))
        return torch.cat([self._spread(part) for part in parts])

    def _spread(self, part: Tensor) -> Tensor:
        padded = F.pad(part, (self.reach, self.reach))
        shifted = padded.unfold(0, 2 * self.reach + 1, 1)  # (n, 2 reach + 1)
        weights = self.fading ** torch.arange(-self.reach, self.reach + 1).abs().float()
        return (shifted * weights).amax(dim=1)


@dataclass(frozen=True, slots=True)
class Windowed:
    """Tokens of a window of `window` share its mean or its largest score; the own score decides within it."""

    inner: Score
    window: int = 8
    by: str = "mean"
    adds_up: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors

    def scores(self, state: PrefillState) -> Tensor:
        parts = self.inner.scores(state).split(lengths(state))
        return torch.cat([self._shared(part) for part in parts])

    def _shared(self, part: Tensor) -> Tensor:
        pieces = part.split(self.window)
        shared = [(piece.mean() if self.by == "mean" else piece.max()).expand(len(piece)) for piece in pieces]
        return torch.cat(shared) + 1e-3 * part


@dataclass(frozen=True, slots=True)
class Sentences:
    """Tokens of a sentence share the sum, mean or largest of its scores."""

    inner: Score
    by: str = "mean"
    adds_up: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors

    def scores(self, state: PrefillState) -> Tensor:
        found = self.inner.scores(state)
        prompt, template = state.request.prompt, state.request.adapter.template
        number, numbers = 0, []
        for m in state.matched:
            if m.origin != "reused":
                continue
            number += 1
            for token in prompt.ids(m.span):
                numbers.append(number)
                if template.text((token,)).rstrip().endswith((".", "!", "?")):
                    number += 1
        index = torch.tensor(numbers)
        size = torch.bincount(index).float()
        total = torch.zeros(len(size)).index_add_(0, index, found)
        if self.by == "max":
            total = torch.zeros(len(size)).scatter_reduce_(0, index, found, "amax")
        elif self.by == "mean":
            total = total / size.clamp(min=1)
        return total[index] + 1e-3 * found


@dataclass(frozen=True, slots=True)
class TimesValueNorm:
    """Attention times the norm of the value that it weighs, over layers."""

    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        first, end = state.context
        probe = AttentionProbe(state.asked, columns=state.context)
        state.run(state.fresh, probe)
        norms = torch.stack(
            [
                layer.values[0, :, first:end].float().square().sum(dim=(0, 2)).sqrt()
                for layer in state.kv_cache.layers
            ]
        )
        return (probe.weights * norms).mean(dim=0).cpu()[state.stale - first]


@dataclass(frozen=True, slots=True)
class LayerWeighted:
    """Question attention of some layers, each divided by its largest weight before they are averaged, or not."""

    layers: tuple[int, ...] | None = None
    peaks: bool = False
    power: float = 1.0
    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        first, _ = state.context
        probe = AttentionProbe(state.asked, columns=state.context)
        state.run(state.fresh, probe)
        weights = probe.weights.cpu()
        if self.layers is not None:
            weights = weights[list(self.layers)]
        weights = weights[:, state.stale - first]
        if self.peaks:
            weights = weights / weights.amax(dim=1, keepdim=True).clamp(min=1e-9)
        return weights.pow(self.power).mean(dim=0)


@dataclass(frozen=True, slots=True)
class TimesMoved:
    """Another score, times how far a preparation moved each token; `floor` keeps what did not move in the running."""

    inner: Score
    moved: ContextSensitivity
    floor: float = 0.0
    added: float = 0.0
    power: float = 1.0
    adds_up: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return (self.moved,)

    def scores(self, state: PrefillState) -> Tensor:
        moved = self.moved.of_stale(state).pow(self.power)
        found = self.inner.scores(state)
        return found * (self.floor + moved) + self.added * moved * found.mean()


@dataclass(frozen=True, slots=True)
class TwoRounds:
    """Part of the budget by the question's attention over stale KV; the rest by its attention after the first repair.

    With `following`, what the repaired tokens attend to counts as well, as much as the question's own attention.
    """

    score: Score = field(default_factory=QuestionAttention)
    share: float = 0.5
    following: float = 0.0
    spread: int = 0
    selects: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        budget, stale = state.request.budget, state.stale
        if budget.nothing or not stale.numel():
            return stale[:0]
        count = budget.rows(stale.numel())
        first = top_tokens(self.score.scores(state), max(1, round(self.share * count)))
        probes = [AttentionProbe(state.asked, columns=state.context)]
        if self.following:
            probes.append(AttentionProbe(stale[first], columns=state.context))
        state.run(torch.cat([stale[first], state.fresh]).sort().values, *probes)
        start = state.context[0]
        again = probes[0].weights.mean(dim=0).cpu()[stale - start]
        if self.following:
            again = again + self.following * probes[1].weights.mean(dim=0).cpu()[stale - start]
        if self.spread:
            again = torch.cat(
                [Spread(self.score, self.spread)._spread(part) for part in again.split(lengths(state))]
            )
        again[first] = float("inf")
        return stale[top_tokens(again, count)]


@dataclass(frozen=True, slots=True)
class Seams:
    """The first `tokens` tokens of every chunk count `much` more than others."""

    inner: Score
    tokens: int = 8
    much: float = 2.0
    adds_up: ClassVar[bool] = False

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        return self.inner.extractors

    def scores(self, state: PrefillState) -> Tensor:
        found = self.inner.scores(state)
        offsets = torch.cat([torch.arange(size) for size in lengths(state)])
        return torch.where(offsets < self.tokens, found * self.much, found)


def _variant(name: str, prepare: Prepare, score: Score) -> tuple[str, Recipe]:
    return name, Recipe(name, prepare=prepare, match=MatchPathThenChunk(), select=Highest(score), ratio=0.1)


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
        _variant("q-moved", Previous(), TimesMoved(QUESTION, ContextSensitivity(Similar()))),
        _variant("q-seams", Previous(), Seams(QUESTION)),
        _variant("q-moved-woven", SimilarAndPrevious(), TimesMoved(QUESTION, ContextSensitivity(Similar()))),
        _variant("q-moved-by-following", Previous(), TimesMoved(QUESTION, ContextSensitivity(Previous()))),
        _variant(
            "q-moved-by-woven", Previous(), TimesMoved(QUESTION, ContextSensitivity(SimilarAndPrevious()))
        ),
        _variant("q-moved-root", Previous(), TimesMoved(QUESTION, ContextSensitivity(Similar()), power=0.5)),
        _variant(
            "q-moved-square", Previous(), TimesMoved(QUESTION, ContextSensitivity(Similar()), power=2.0)
        ),
        _variant("q-moved-added", Previous(), TimesMoved(QUESTION, ContextSensitivity(Similar()), added=1.0)),
        _variant(
            "q-moved-peaks", Previous(), TimesMoved(LayerWeighted(peaks=True), ContextSensitivity(Similar()))
        ),
        _variant(
            "q-moved-last",
            Previous(),
            TimesMoved(QuestionAttention(layers=(-4, -3, -2, -1)), ContextSensitivity(Similar())),
        ),
        _variant("q-moved-isolated", Isolated(), TimesMoved(QUESTION, ContextSensitivity(Similar()))),
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
