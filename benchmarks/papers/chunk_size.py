"""Smaller and larger chunks (ProphetKV)."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure
from side_by_side import Grid

from kvweave.evaluation.report.style import Theme
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
    baselines,
    gain_of,
    halved,
    score_of,
    score_table,
    spoken,
)
from papers.figures import curves

SIZES = (32, 64, 128, 256)
RATIO = 0.2
MINE, OTHERS = "prophetkv", ("cacheblend", "kvshare", "epic")
TASK = "multivalue"


def variants() -> Mapping[str, Recipe]:
    return {name: recipe_named(name) for name in (MINE, *OTHERS)}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """The paper's task, RULER's multi-value needle; every size has prompts of its own."""
    suite = replace(SUITE, tasks=(TASK,), ratios=(RATIO,), seeds=(0, 1), samples=halved(setting.samples))
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
    """What is lost against full attention, by chunk size."""
    panel = {
        name: {size: score_of(result, name, RATIO, part=str(size)) for size in SIZES}
        for name in (MINE, *OTHERS)
    }
    full, reuse = ({size: baselines(result, str(size))[which] for size in SIZES} for which in (0, 1))
    heading = (f"Chunk size, {TASK}, ratio {RATIO:g}", "512 tokens of context · bands: 95 % interval")
    panels = {TASK: {"full": full, **panel, "reuse": reuse}}
    return curves(heading, panels, ("tokens in a chunk, at most", "score"), theme)


CLAIM = Claim(
    name="chunk-size",
    title="Chunk size",
    paper="ProphetKV §5.4, fig. 10",
    says="ProphetKV is the most accurate at every chunk size, and every method loses accuracy as chunks get smaller.",
    tried=f"`{TASK}` at ratio {RATIO:g} with chunks of at most {', '.join(map(str, SIZES))} tokens in 512 tokens of context.",
    grids=grids,
    figures=lambda found: answered(found, [_pair(other) for other in OTHERS]),
    verdicts=verdicts,
    table=lambda result: score_table(result, parts={str(size): str(size) for size in SIZES}),
    draw=draw,
)
