"""Fragmented values: some tokens of a number are recomputed and others stale (CacheClip)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvweave.ops.scores import windowed_ranks
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheblend import ValueDeviation
from kvweave.recipes.methods.cacheclip import AuxiliaryWindows
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Score
from kvweave_lab.eval.comparisons import mean_difference
from kvweave_lab.eval.outcomes import REUSE, Outcome
from kvweave_lab.eval.samples import Sample
from kvweave_lab.report.figures import Theme
from kvweave_lab.statistics import Estimate
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    baselines_by_task,
    better,
    estimate,
    estimate_json,
    halved,
    label,
    score_numbers,
    score_of,
    score_table,
    tasks_of,
    with_interval,
)
from papers.plots import curves
from recipe_grid import Grid

RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
BETWEEN = (0.3, 0.5, 0.7)  # the ratios of the paper's collapse
BLEND, BLEND_WINDOWS = "cacheblend", "cacheblend in windows"
CLIP, CLIP_ALONE = "cacheclip", "cacheclip without windows"


@dataclass(frozen=True)
class InWindows:
    """CacheClip's windows for any score: 8 tokens are selected together if more than 5 of them rank high enough.

    The whole budget is used.
    """

    score: Score
    window: int = 8
    more_than: int = 5
    selective: ClassVar[bool] = True
    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def choose(self, state: PrefillState) -> Tensor:
        """Return the selected stale rows: rows in complete windows come first."""
        stale, count = state.stale, state.request.budget.max_rows(state.stale.numel())
        if not count:
            return torch.empty(0, dtype=torch.long)
        lengths = [m.span.tokens for m in state.matched if m.origin == "reused"]
        needed = windowed_ranks(
            self.score.scores(state), lengths, window=self.window, more_than=self.more_than
        )
        return stale[needed.argsort(stable=True)[:count].sort().values]


def variants() -> Mapping[str, Recipe]:
    """Return CacheBlend and CacheClip, each with and without windows."""
    blend, clip = recipe_named(BLEND), recipe_named("cacheclip")
    return {
        BLEND: blend,
        BLEND_WINDOWS: replace(blend, select=InWindows(ValueDeviation())),
        CLIP: recipe_named(CLIP),
        CLIP_ALONE: replace(clip, select=AuxiliaryWindows(window=1, more_than=0, refill=True)),
    }


def kind(sample: Sample) -> str | None:
    """Return the kind of the answer, number or UUID; None for words, which are left out."""
    value = sample.answers[0]
    return "number" if value.isdigit() else "UUID" if value.count("-") == 4 else None


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return more prompts than needed: about a third of the needles are numbers, and a third UUIDs."""
    suite = replace(
        SUITE, tasks=("single",), ratios=RATIOS, seeds=(0, 1), samples=halved(7 * setting.samples // 2)
    )
    return {"": Grid(variants, suite, setting.split, kind=kind)}


_WINDOWS = ((BLEND_WINDOWS, BLEND), (CLIP, CLIP_ALONE))
_COMPARED = ((BLEND, REUSE), *_WINDOWS)


def _pair(first: str, second: str, ratio: float) -> Pair:
    return Pair((first, ratio), (second, 0.0 if second == REUSE else ratio))


def numbers(found: Mapping[str, Sequence[Outcome]]) -> Result:
    """Return the gains at every ratio, and each kind's paired mean over BETWEEN, which is fixed beforehand."""
    pairs = [_pair(*names, ratio) for names in _COMPARED for ratio in RATIOS]
    between = []
    for task in dict.fromkeys(outcome.task for outcome in found[""]):
        of_task = [outcome for outcome in found[""] if outcome.task == task]
        for first, second in _COMPARED:
            runs = [_pair(first, second, ratio) for ratio in BETWEEN]
            gain = mean_difference(of_task, [(label(run.first), label(run.second)) for run in runs])
            if gain is not None:
                between.append({"task": task, "mine": first, "theirs": second, **estimate_json("gain", gain)})
    return {**score_numbers(found, pairs), "between": between}


def _between(result: Result, task: str, first: str, second: str) -> Estimate | None:
    wanted = (task, first, second)
    row = next((b for b in result["between"] if (b["task"], b["mine"], b["theirs"]) == wanted), None)
    return estimate(row, "gain") if row else None


def verdicts(result: Result) -> list[Verdict]:
    """Return for each kind whether scores fall below plain reuse, and the gain of windows, averaged over BETWEEN."""
    found = []
    where = f"averaged over {', '.join(f'{ratio:.0%}' for ratio in BETWEEN)}"
    for task in tasks_of(result):
        fall = _between(result, task, BLEND, REUSE)
        if fall is not None:
            held = True if fall.high < 0 else False if fall.low > 0 else None
            statement = f"`cacheblend` falls below plain reuse on {task} needles: {where}, the difference is"
            found.append(Verdict(held, f"{statement} {with_interval(fall, '+.3f')}."))
        for with_windows, without in _WINDOWS:
            gain = _between(result, task, with_windows, without)
            found += better(f"Windows lift `{without}` on {task} needles, {where}", gain)
    return found


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure of the score by ratio, with a panel for each kind of needle."""
    panels = {
        task: {
            name: {ratio: score_of(result, name, ratio, task=task) for ratio in RATIOS} for name in variants()
        }
        for task in tasks_of(result)
    }
    heading = ("Needles that take several tokens", "512 tokens of context · bands: 95 % interval")
    return curves(
        heading, panels, ("share of stale tokens recomputed", "score"), theme, baselines_by_task(result)
    )


CLAIM = Claim(
    name="fragments",
    title="Fragmented numbers",
    paper="CacheClip §4.2 and App. A (the tables of CacheBlend and CacheClip)",
    finding="CacheBlend recomputes some tokens of a number or UUID and leaves others stale: between ratios of 30 % and 80 %, its score on"
    " such needles is far lower than at small ratios. CacheClip's windows keep values together and avoid it.",
    setup="Single needles that are 7-digit numbers or UUIDs. `cacheblend` and `cacheclip`, each with windows and without; all use their"
    " whole budget, so that compared recipes recompute equally many rows.",
    grids=grids,
    numbers=numbers,
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
