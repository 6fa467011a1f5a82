"""Values cut to pieces: half a number recomputed and half of it stale (CacheClip)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvweave.ops.scores import kept_from
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheblend import ValueDeviation
from kvweave.recipes.methods.cacheclip import AuxiliaryWindows
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score
from kvweave.recipes.state import PrefillState
from kvweave_lab.eval.comparison import mean_difference
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import REUSE, Estimate, Outcome
from kvweave_lab.eval.samples import Sample
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    answered,
    baselines,
    better,
    estimate,
    halved,
    label,
    plain,
    score_of,
    score_table,
    spoken,
    tasks_of,
)
from papers.figures import curves
from side_by_side import Grid

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
BETWEEN = (0.3, 0.5, 0.7)  # where the paper's collapse lies
BLEND, BLEND_WINDOWS = "cacheblend", "cacheblend in windows"
CLIP, CLIP_ALONE = "cacheclip-refill", "cacheclip without windows"


@dataclass(frozen=True)
class InWindows:
    """CacheClip's windows around any score: 8 tokens that are kept where more than 5 of them are chosen, budget used up."""

    score: Score
    window: int = 8
    more_than: int = 5
    selects: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    records: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        """Stale rows in whole windows first, what stands in none at last."""
        stale, count = state.stale, state.request.budget.rows(state.stale.numel())
        if not count:
            return torch.empty(0, dtype=torch.long)
        lengths = [m.span.tokens for m in state.matched if m.origin == "reused"]
        needed = kept_from(self.score.scores(state), lengths, window=self.window, more_than=self.more_than)
        return stale[needed.argsort(stable=True)[:count].sort().values]


def variants() -> Mapping[str, Recipe]:
    """CacheBlend's deviation and CacheClip's auxiliary attention, each with and without windows."""
    blend, clip = recipe_named(BLEND), recipe_named("cacheclip")
    return {
        BLEND: blend,
        BLEND_WINDOWS: replace(blend, select=InWindows(ValueDeviation())),
        CLIP: recipe_named(CLIP),
        CLIP_ALONE: replace(clip, select=AuxiliaryWindows(window=1, more_than=0, refill=True)),
    }


def kind(sample: Sample) -> str | None:
    """Numbers and UUIDs; words are left out."""
    value = sample.answers[0]
    return "number" if value.isdigit() else "UUID" if value.count("-") == 4 else None


def grids(setting: Setting) -> Mapping[str, Grid]:
    """A third of the needles are numbers and a third UUIDs; a few more are drawn, since the kinds vary in number."""
    suite = replace(
        SUITE, tasks=("single",), ratios=RATIOS, seeds=(0, 1), samples=halved(7 * setting.samples // 2)
    )
    return {"": Grid(variants, suite, setting.split, kind=kind)}


_WINDOWS = ((BLEND_WINDOWS, BLEND), (CLIP, CLIP_ALONE))
_COMPARED = ((BLEND, REUSE), *_WINDOWS)


def _pair(mine: str, theirs: str, ratio: float) -> Pair:
    return Pair((mine, ratio), (theirs, 0.0 if theirs == REUSE else ratio))


def figures(found: Mapping[str, Sequence[Outcome]]) -> Result:
    """Every ratio alone, and each kind's mean over the ratios between, prompt by prompt: none is picked afterwards."""
    pairs = [_pair(*names, ratio) for names in _COMPARED for ratio in RATIOS]
    between = []
    for task in dict.fromkeys(outcome.task for outcome in found[""]):
        here = [outcome for outcome in found[""] if outcome.task == task]
        for mine, theirs in _COMPARED:
            runs = [_pair(mine, theirs, ratio) for ratio in BETWEEN]
            gain = mean_difference(here, [(label(run.mine), label(run.theirs)) for run in runs])
            if gain is not None:
                between.append({"task": task, "mine": mine, "theirs": theirs, **plain("gain", gain)})
    return {**answered(found, pairs), "between": between}


def _between(result: Result, task: str, mine: str, theirs: str) -> Estimate | None:
    wanted = (task, mine, theirs)
    kept = next((b for b in result["between"] if (b["task"], b["mine"], b["theirs"]) == wanted), None)
    return estimate(kept, "gain") if kept else None


def verdicts(result: Result) -> list[Verdict]:
    """The fall below plain reuse for each kind, and what windows give there: on the mean over the ratios between."""
    found = []
    where = f"on the mean over {', '.join(f'{ratio:.0%}' for ratio in BETWEEN)}"
    for task in tasks_of(result):
        fall = _between(result, task, BLEND, REUSE)
        if fall is not None:
            held = True if fall.high < 0 else False if fall.low > 0 else None
            said = f"`cacheblend` falls below plain reuse on {task} needles: {where}, the difference is"
            found.append(Verdict(held, f"{said} {spoken(fall, '+.3f')}."))
        for with_windows, without in _WINDOWS:
            gain = _between(result, task, with_windows, without)
            found += better(f"Windows lift `{without}` on {task} needles, {where}", gain)
    return found


def draw(result: Result, theme: Theme) -> Figure:
    """Score by ratio, a panel for each kind of needle."""
    panels = {
        task: {
            name: {ratio: score_of(result, name, ratio, task=task) for ratio in RATIOS} for name in variants()
        }
        for task in tasks_of(result)
    }
    lines = {
        task: dict(zip(("full attention", "reuse"), baselines(result, task=task), strict=True))
        for task in panels
    }
    heading = ("Needles that take several tokens", "512 tokens of context · bands: 95 % interval")
    return curves(heading, panels, ("share of stale tokens recomputed", "score"), theme, lines)


CLAIM = Claim(
    name="fragments",
    title="Numbers cut to pieces",
    paper="CacheClip §4.2 and App. A (the tables of CacheBlend and CacheClip)",
    says="CacheBlend recomputes some tokens of a number or UUID and leaves others stale: between ratios of 30 % and 80 % its score on"
    " such needles falls far below what it is with little recomputed. CacheClip's windows keep values together and avoid it.",
    tried="Single needles that are 7-digit numbers or UUIDs. `cacheblend` and `cacheclip`, each with windows and without; all use their"
    " budget up, so that as many rows are recomputed on both sides.",
    grids=grids,
    figures=figures,
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
