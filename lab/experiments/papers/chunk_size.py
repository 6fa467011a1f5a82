"""Smaller and larger chunks (ProphetKV)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.outcomes import FULL, REUSE, Outcome
from kvweave_lab.report.figures import Theme
from kvweave_lab.statistics import Estimate, unpaired_over_tasks
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    better,
    estimate,
    estimate_json,
    gain_of,
    label,
    score_numbers,
    score_of,
    score_table,
    with_interval,
)
from papers.plots import Curve, curves
from recipe_grid import Grid

SIZES = (32, 64, 128)
RATIO = 0.2
MAIN, OTHERS = "prophetkv", ("cacheblend", "kvshare", "epic")
MULTIVALUE, OTHER_TASK = TASKS = ("multivalue", "vartrack")
"""The paper's task, which the verdicts follow, and one on which plain reuse loses more."""


def variants() -> Mapping[str, Recipe]:
    return {name: recipe_named(name) for name in (MAIN, *OTHERS)}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return the paper's task and one on which plain reuse loses more; every size has its own prompts."""
    suite = replace(SUITE, tasks=TASKS, ratios=(RATIO,), samples=setting.samples)
    return {str(size): Grid(variants, replace(suite, chunk_tokens=size), setting.split) for size in SIZES}


def numbers(found: Mapping[str, Sequence[Outcome]]) -> Result:
    """Return paired gains at every size, and how much more each recipe loses with the smallest chunks.

    The latter compares different prompts, since every size has its own.
    """
    smaller = []
    for name in (MAIN, *OTHERS):
        small, large = (_losses(found[str(size)], name) for size in (SIZES[0], SIZES[-1]))
        smaller.append({"recipe": name, **estimate_json("more", unpaired_over_tasks(small, large))})
    return {**score_numbers(found, [_pair(other) for other in OTHERS]), "smaller": smaller}


def _losses(outcomes: Sequence[Outcome], name: str) -> list[list[float]]:
    """Return full attention's score minus the recipe's on each prompt, task by task."""
    full = {(one.task, one.sample): one.score for one in outcomes if one.recipe == FULL}
    tasks: dict[str, list[float]] = {}
    for one in outcomes:
        if one.label == label((name, RATIO)):
            tasks.setdefault(one.task, []).append(full[one.task, one.sample] - one.score)
    return list(tasks.values())


def _pair(other: str) -> Pair:
    return Pair((MAIN, RATIO), (other, RATIO))


def verdicts(result: Result) -> list[Verdict]:
    """Return whether ProphetKV is best at every size, and the losses with the smallest and largest chunks."""
    found = []
    for other in OTHERS:
        gains, elsewhere = (_gains(result, other, task) for task in TASKS)
        held = True if all(g.low > 0 for g in gains.values()) else None
        held = False if any(g.high < 0 for g in gains.values()) else held
        found.append(
            Verdict(
                held,
                f"`{MAIN}` scores higher than `{other}` at every chunk size on `{MULTIVALUE}`, the paper's task"
                f" ({_by_size(gains)}). On `{OTHER_TASK}`: {_by_size(elsewhere)}.",
            )
        )
    for row in result["smaller"]:
        small, large = (
            score_of(result, row["recipe"], RATIO, part=str(size), what="lost").value
            for size in (SIZES[0], SIZES[-1])
        )
        statement = (
            f"`{row['recipe']}` loses more against full attention with smaller chunks, over both tasks ({small:.3f} with {SIZES[0]} tokens,"
            f" {large:.3f} with {SIZES[-1]}; the difference is unpaired)"
        )
        found += better(statement, estimate(row, "more"))
    return found


def _gains(result: Result, other: str, task: str) -> dict[int, Estimate]:
    found = {size: gain_of(result, _pair(other), part=str(size), task=task) for size in SIZES}
    return {size: gain for size, gain in found.items() if gain is not None}


def _by_size(gains: Mapping[int, Estimate]) -> str:
    return "; ".join(f"{size}: {with_interval(gain, '+.3f')}" for size, gain in gains.items())


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure of the score by chunk size, with a panel for each task."""
    panels = {task: _curves_of(result, task) for task in TASKS}
    heading = (f"Chunk size, ratio {RATIO:g}", "512 tokens of context · bands: 95 % interval")
    return curves(heading, panels, ("maximal tokens per chunk", "score"), theme, scale="log")


def _curves_of(result: Result, task: str) -> Mapping[str, Curve]:
    runs = {FULL: 1.0, **dict.fromkeys((MAIN, *OTHERS), RATIO), REUSE: 0.0}
    return {
        name: {size: score_of(result, name, ratio, part=str(size), task=task) for size in SIZES}
        for name, ratio in runs.items()
    }


CLAIM = Claim(
    name="chunk-size",
    title="Chunk size",
    paper="ProphetKV §5.4, fig. 10",
    finding="ProphetKV is the most accurate at every chunk size, and every method loses accuracy as chunks get smaller.",
    setup=f"`{'` and `'.join(TASKS)}` at ratio {RATIO:g} with chunks of at most {', '.join(map(str, SIZES))} tokens in 512 tokens of context.",
    grids=grids,
    numbers=numbers,
    verdicts=verdicts,
    table=lambda result: score_table(result, parts={str(size): str(size) for size in SIZES}),
    draw=draw,
)
