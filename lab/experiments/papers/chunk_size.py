"""Smaller and larger chunks (ProphetKV)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import FULL, REUSE, Outcome
from kvweave_lab.eval.statistics import unpaired_over_tasks
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    answered,
    better,
    estimate,
    gain_of,
    label,
    plain,
    score_of,
    score_table,
    spoken,
)
from papers.figures import Curve, curves
from side_by_side import Grid

SIZES = (32, 64, 128)
RATIO = 0.2
MINE, OTHERS = "prophetkv", ("cacheblend", "kvshare", "epic")
TASKS = ("multivalue", "vartrack")


def variants() -> Mapping[str, Recipe]:
    return {name: recipe_named(name) for name in (MINE, *OTHERS)}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """The paper's task and one on which plain reuse loses more; every size has prompts of its own."""
    suite = replace(SUITE, tasks=TASKS, ratios=(RATIO,), samples=setting.samples)
    return {str(size): Grid(variants, replace(suite, chunk_tokens=size), setting.split) for size in SIZES}


def figures(found: Mapping[str, Sequence[Outcome]]) -> Result:
    """Who is ahead at every size, prompt by prompt; and how much more each loses with the smallest chunks.

    The latter compares different prompts, since every size has its own.
    """
    smaller = []
    for name in (MINE, *OTHERS):
        small, large = (_losses(found[str(size)], name) for size in (SIZES[0], SIZES[-1]))
        smaller.append({"recipe": name, **plain("more", unpaired_over_tasks(small, large))})
    return {**answered(found, [_pair(other) for other in OTHERS]), "smaller": smaller}


def _losses(outcomes: Sequence[Outcome], name: str) -> list[list[float]]:
    """What a recipe's score lacks to full attention's on each prompt, task by task."""
    full = {(one.task, one.sample): one.score for one in outcomes if one.recipe == FULL}
    tasks: dict[str, list[float]] = {}
    for one in outcomes:
        if one.label == label((name, RATIO)):
            tasks.setdefault(one.task, []).append(full[one.task, one.sample] - one.score)
    return list(tasks.values())


def _pair(other: str) -> Pair:
    return Pair((MINE, RATIO), (other, RATIO))


def verdicts(result: Result) -> list[Verdict]:
    """The best of all at every size, and everybody's losses with the smallest chunks and with the largest."""
    found = []
    for other in OTHERS:
        gains = {
            size: gain
            for size in SIZES
            if (gain := gain_of(result, _pair(other), part=str(size))) is not None
        }
        held = True if all(g.low > 0 for g in gains.values()) else None
        held = False if any(g.high < 0 for g in gains.values()) else held
        said = "; ".join(f"{size}: {spoken(gain, '+.3f')}" for size, gain in gains.items())
        found.append(Verdict(held, f"`{MINE}` scores higher than `{other}` at every chunk size ({said})."))
    for kept in result["smaller"]:
        small, large = (
            score_of(result, kept["recipe"], RATIO, part=str(size), what="lost").value
            for size in (SIZES[0], SIZES[-1])
        )
        said = (
            f"`{kept['recipe']}` loses more against full attention with smaller chunks ({small:.3f} with {SIZES[0]} tokens,"
            f" {large:.3f} with {SIZES[-1]}; the difference is unpaired)"
        )
        found += better(said, estimate(kept, "more"))
    return found


def draw(result: Result, theme: Theme) -> Figure:
    """Score by chunk size, a panel for each task."""
    panels = {task: _curves_of(result, task) for task in TASKS}
    heading = (f"Chunk size, ratio {RATIO:g}", "512 tokens of context · bands: 95 % interval")
    return curves(heading, panels, ("tokens in a chunk, at most", "score"), theme, scale="log")


def _curves_of(result: Result, task: str) -> Mapping[str, Curve]:
    runs = {FULL: 1.0, **dict.fromkeys((MINE, *OTHERS), RATIO), REUSE: 0.0}
    return {
        name: {size: score_of(result, name, ratio, part=str(size), task=task) for size in SIZES}
        for name, ratio in runs.items()
    }


CLAIM = Claim(
    name="chunk-size",
    title="Chunk size",
    paper="ProphetKV §5.4, fig. 10",
    says="ProphetKV is the most accurate at every chunk size, and every method loses accuracy as chunks get smaller.",
    tried=f"`{'` and `'.join(TASKS)}` at ratio {RATIO:g} with chunks of at most {', '.join(map(str, SIZES))} tokens in 512 tokens of context.",
    grids=grids,
    figures=figures,
    verdicts=verdicts,
    table=lambda result: score_table(result, parts={str(size): str(size) for size in SIZES}),
    draw=draw,
)
