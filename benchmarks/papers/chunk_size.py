"""Smaller and larger chunks (ProphetKV)."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure
from side_by_side import Grid

from kvweave.evaluation.report.style import Theme
from kvweave.evaluation.results import FULL, REUSE
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    answered,
    gain_of,
    score_of,
    score_table,
    spoken,
)
from papers.figures import Curve, curves

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
    for name in (MINE, *OTHERS):
        small, large = (
            score_of(result, name, RATIO, part=str(size), what="lost") for size in (SIZES[0], SIZES[-1])
        )
        held = True if small.low > large.high else False if small.high < large.low else None
        said = f"{spoken(small)} with chunks of {SIZES[0]} tokens, {spoken(large)} with chunks of {SIZES[-1]}"
        found.append(
            Verdict(held, f"`{name}` loses more against full attention with smaller chunks: {said}.")
        )
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
    figures=lambda found: answered(found, [_pair(other) for other in OTHERS]),
    verdicts=verdicts,
    table=lambda result: score_table(result, parts={str(size): str(size) for size in SIZES}),
    draw=draw,
)
