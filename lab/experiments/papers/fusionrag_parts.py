"""The gain of each component of FusionRAG: preparation and selection (FusionRAG)."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.outcomes import FULL, REUSE
from kvweave_lab.report.figures import Theme
from papers.claim import (
    LACKING_TASKS,
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    estimate,
    gain_verdicts,
    row_of,
    score_numbers,
    score_panels,
    score_table,
    with_interval,
)
from papers.plots import bars
from recipe_grid import Grid

RATIO = 0.15
PREPARED, SELECTED, BOTH = "similar chunks alone", "selection alone", "fusionrag-alone"
RUNS = {FULL: 1.0, BOTH: RATIO, SELECTED: RATIO, PREPARED: 0.0, REUSE: 0.0}
"""The runs in the figure, with their ratios."""


def variants() -> Mapping[str, Recipe]:
    """Return recipes with one component and with both; plain reuse always runs."""
    return {
        PREPARED: recipe_named(REUSE, "similar"),
        SELECTED: recipe_named(BOTH, "isolated"),
        BOTH: recipe_named(BOTH),
    }


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return tasks on which plain reuse lacks information from other chunks."""
    suite = replace(SUITE, tasks=LACKING_TASKS, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


def _pair(first: str, second: str) -> Pair:
    return Pair((first, RUNS[first]), (second, RUNS[second]))


_POINTS = {
    "Preparing chunks after similar ones scores higher than plain reuse": _pair(PREPARED, REUSE),
    "Selection alone scores higher than plain reuse": _pair(SELECTED, REUSE),
    "Preparation adds to selection": _pair(BOTH, SELECTED),
    "Selection adds to preparation": _pair(BOTH, PREPARED),
}


def verdicts(result: Result) -> list[Verdict]:
    """Return verdicts on each component, and on the share of full attention's gain that both restore."""
    found = gain_verdicts(result, _POINTS)
    both = row_of(result, BOTH, RATIO)
    if both is not None and both["normalised"] is not None:
        restored = estimate(both, "normalised")
        held = True if restored.low >= 0.8 else False if restored.high < 0.8 else None
        found.append(
            Verdict(
                held,
                f"Both together restore most of what full attention gains over reuse: {with_interval(restored)}.",
            )
        )
    return found


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure with a bar for each run, and a panel for the mean and each task."""
    panels = score_panels(result, RUNS)
    heading = (f"FusionRAG part by part, ratio {RATIO:g}", "512 tokens of context · lines: 95 % interval")
    return bars(heading, panels, list(RUNS), "score", theme)


CLAIM = Claim(
    name="fusionrag-parts",
    title="FusionRAG component by component",
    paper="FusionRAG §5.3.3, fig. 18 (answer quality; its other parts are about time)",
    finding="Selection by the question alone restores 72 % of what full attention gains over full reuse, and preparation after similar"
    " chunks brings that to 99 %.",
    setup=f"Plain reuse, preparation alone, selection alone at ratio {RATIO:g}, and both. Most means four fifths.",
    grids=grids,
    numbers=lambda found: score_numbers(found, list(_POINTS.values())),
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
