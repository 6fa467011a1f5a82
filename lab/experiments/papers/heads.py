"""Selections prefer the beginnings of chunks and late chunks (FusionRAG)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.report.figures import Theme
from kvweave_lab.statistics import Estimate
from papers import selected
from papers.claim import (
    SUITE,
    Claim,
    Result,
    Setting,
    Verdict,
    better,
    estimate,
    estimate_json,
    with_interval,
)
from papers.plots import curves
from papers.selected import FIFTHS, TENTHS, Selected
from recipe_grid import Grid

RATIO = 0.15
BLEND, GUIDED, ALL_LAYERS = "cacheblend", "fusionrag-alone, isolated chunks", "prophetkv"


def variants() -> Mapping[str, Recipe]:
    """Return recipes with the same stale KV, which differ only in their selection."""
    return {
        BLEND: recipe_named(BLEND),
        GUIDED: recipe_named("fusionrag-alone", "isolated"),
        ALL_LAYERS: recipe_named(ALL_LAYERS),
    }


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return a task with one fact among others, and one with two facts that belong together."""
    suite = replace(SUITE, tasks=("multikey", "twohop"), ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


def at_head(one: Selected) -> float | None:
    """Return the share of rows in the first tenth of their chunk, relative to chance."""
    return _relative_share("tenths", 0, one)


def late(one: Selected) -> float | None:
    """Return the share of rows in the last fifth of the chunks, relative to chance."""
    return _relative_share("fifths", -1, one)


def _relative_share(partition: str, index: int, one: Selected) -> float | None:
    """Return a share relative to chance; None if that part has no stale rows, as with fewer than five chunks."""
    by_chance = getattr(one, f"stale_{partition}")[index]
    return getattr(one, partition)[index] / by_chance if by_chance else None


def numbers(found: Mapping[str, Sequence[Selected]]) -> Result:
    """Return by recipe the relative shares of tenths and fifths, and CacheBlend's difference from the guided selection."""
    by_recipe: dict[str, list[Selected]] = {}
    for one in found[""]:
        by_recipe.setdefault(one.recipe, []).append(one)
    shares = [
        {
            "recipe": name,
            "samples": len(own),
            **{
                which: [
                    estimate_json("times", selected.over_tasks(own, partial(_relative_share, which, at)))
                    for at in range(count)
                ]
                for which, count in (("tenths", TENTHS), ("fifths", FIFTHS))
            },
        }
        for name, own in by_recipe.items()
    ]
    pair = by_recipe[BLEND], by_recipe[GUIDED]
    gains = {
        name: estimate_json("gain", selected.gain(*pair, value))
        for name, value in (("head", at_head), ("late", late))
    }
    return {"shares": shares, "gains": gains}


def _shares(result: Result) -> Mapping[str, Mapping[str, list[Estimate]]]:
    return {
        one["recipe"]: {
            which: [estimate(each, "times") for each in one[which]] for which in ("tenths", "fifths")
        }
        for one in result["shares"]
    }


def verdicts(result: Result) -> list[Verdict]:
    """Return verdicts on CacheBlend's two biases, each compared with chance and with the guided selection."""
    blend = _shares(result)[BLEND]
    found = []
    for place, where, which, at in (
        ("head", "in the first tenth of their chunk", "tenths", 0),
        ("late", "in the last fifth of the chunks", "fifths", -1),
    ):
        times = blend[which][at]
        held = True if times.low > 1 else False if times.high < 1 else None
        statement = f"`{BLEND}` selects more tokens than by chance {where}: {with_interval(times, '.2f')} times as many."
        found.append(Verdict(held, statement))
        gain = estimate(result["gains"][place], "gain")
        found += better(
            f"It does so more than FusionRAG's selection (difference in times by chance, {where})", gain
        )
    return found


def table(result: Result) -> list[str]:
    """Return a table of the first tenth and the last fifth."""
    lines = [
        "| recipe | first tenth of a chunk, times by chance | last fifth of the chunks, times by chance |"
    ]
    lines.append("|---|---|---|")
    for name, own in _shares(result).items():
        lines.append(
            f"| `{name}` | {with_interval(own['tenths'][0], '.2f')} | {with_interval(own['fifths'][-1], '.2f')} |"
        )
    return lines


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure by tenth of the chunk and by fifth of the chunks."""
    found = _shares(result)
    panels = {
        title: {name: dict(enumerate(own[which], 1)) for name, own in found.items()}
        for title, which in (("by tenth of their chunk", "tenths"), ("by fifth of the chunks", "fifths"))
    }
    heading = (
        f"Where the selected {RATIO:.0%} lie",
        "512 tokens of context · bands: 95 % interval · 1 is chance",
    )
    return curves(heading, panels, ("place", "times as many as by chance"), theme)


CLAIM = Claim(
    name="heads",
    title="Beginnings of chunks and late chunks",
    paper="FusionRAG §3.2, fig. 8",
    finding="CacheBlend selects mostly at the beginnings of chunks and in late chunks; selection by the question spreads over chunks,"
    " with a slight preference for their beginnings.",
    setup=f"Rows selected at ratio {RATIO:g} over isolated chunks, compared with as many random rows.",
    grids=grids,
    numbers=numbers,
    verdicts=verdicts,
    table=table,
    draw=draw,
    measure=selected.run,
)
