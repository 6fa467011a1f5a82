"""Selections that favour the heads of chunks and late chunks (FusionRAG)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import Estimate
from papers import selected
from papers.claim import SUITE, Claim, Result, Setting, Verdict, better, estimate, plain, spoken
from papers.figures import curves
from papers.selected import FIFTHS, TENTHS, Selected
from side_by_side import Grid

RATIO = 0.15
BLEND, GUIDED, ALL_LAYERS = "cacheblend", "fusionrag, isolated chunks", "prophetkv"


def variants() -> Mapping[str, Recipe]:
    """All on the same stale KV, so that they differ in their selection alone."""
    return {
        BLEND: recipe_named(BLEND),
        GUIDED: recipe_named("fusionrag", "isolated"),
        ALL_LAYERS: recipe_named(ALL_LAYERS),
    }


def grids(setting: Setting) -> Mapping[str, Grid]:
    """One fact among others, and two facts that belong together."""
    suite = replace(SUITE, tasks=("multikey", "twohop"), ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


def at_head(one: Selected) -> float | None:
    """How many times as many rows as by chance lie in the first tenth of their chunk."""
    return _times("tenths", 0, one)


def late(one: Selected) -> float | None:
    """The same of the last fifth of the chunks."""
    return _times("fifths", -1, one)


def _times(which: str, place: int, one: Selected) -> float | None:
    """None where nothing could have been selected, as in some fifth of fewer than five stale chunks."""
    by_chance = getattr(one, f"stale_{which}")[place]
    return getattr(one, which)[place] / by_chance if by_chance else None


def figures(found: Mapping[str, Sequence[Selected]]) -> Result:
    """By recipe: times as many as by chance, by tenth and by fifth; and CacheBlend against the guided selection."""
    by_recipe: dict[str, list[Selected]] = {}
    for one in found[""]:
        by_recipe.setdefault(one.recipe, []).append(one)
    shares = [
        {
            "recipe": name,
            "samples": len(own),
            **{
                which: [
                    plain("times", selected.over_tasks(own, partial(_times, which, at)))
                    for at in range(count)
                ]
                for which, count in (("tenths", TENTHS), ("fifths", FIFTHS))
            },
        }
        for name, own in by_recipe.items()
    ]
    pair = by_recipe[BLEND], by_recipe[GUIDED]
    gains = {
        name: plain("gain", selected.gain(*pair, value))
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
    """CacheBlend's two biases, each against chance and against the guided selection."""
    blend = _shares(result)[BLEND]
    found = []
    for place, where, which, at in (
        ("head", "in the first tenth of their chunk", "tenths", 0),
        ("late", "in the last fifth of the chunks", "fifths", -1),
    ):
        times = blend[which][at]
        held = True if times.low > 1 else False if times.high < 1 else None
        said = f"`{BLEND}` selects more tokens than by chance {where}: {spoken(times, '.2f')} times as many."
        found.append(Verdict(held, said))
        gain = estimate(result["gains"][place], "gain")
        found += better(
            f"It does so more than FusionRAG's selection (difference in times by chance, {where})", gain
        )
    return found


def table(result: Result) -> list[str]:
    """First tenth and last fifth."""
    lines = [
        "| recipe | first tenth of a chunk, times by chance | last fifth of the chunks, times by chance |"
    ]
    lines.append("|---|---|---|")
    for name, own in _shares(result).items():
        lines.append(f"| `{name}` | {spoken(own['tenths'][0], '.2f')} | {spoken(own['fifths'][-1], '.2f')} |")
    return lines


def draw(result: Result, theme: Theme) -> Figure:
    """By tenth of the chunk, and by fifth of the chunks."""
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
    title="Heads of chunks and late chunks",
    paper="FusionRAG §3.2, fig. 8",
    says="CacheBlend selects mostly at the heads of chunks and in late chunks; selection by the question spreads over the chunks, though"
    " it too likes their beginnings a little.",
    tried=f"Rows selected at ratio {RATIO:g} over isolated chunks, against what as many rows drawn by chance would be.",
    grids=grids,
    figures=figures,
    verdicts=verdicts,
    table=table,
    draw=draw,
    measure=selected.run,
)
