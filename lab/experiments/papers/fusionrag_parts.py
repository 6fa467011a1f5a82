"""What each part of FusionRAG is worth: preparation and selection (FusionRAG)."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import FULL, REUSE
from kvweave_lab.eval.summary import OVERALL
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
    row_of,
    score_table,
    spoken,
    tasks_of,
)
from papers.figures import bars
from side_by_side import Grid

RATIO = 0.15
PREPARED, SELECTED, BOTH = "similar chunks alone", "selection alone", "fusionrag"
RUNS = {FULL: 1.0, BOTH: RATIO, SELECTED: RATIO, PREPARED: 0.0, REUSE: 0.0}
"""What the figure shows, each at its ratio."""


def variants() -> Mapping[str, Recipe]:
    """One part at a time, and both; plain reuse runs anyway."""
    return {
        PREPARED: recipe_named(REUSE, "similar"),
        SELECTED: recipe_named(BOTH, "isolated"),
        BOTH: recipe_named(BOTH),
    }


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Tasks on which plain reuse loses something that another chunk says."""
    tasks = ("vartrack", "coref", "contradiction", "order")
    suite = replace(SUITE, tasks=tasks, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(variants, suite, setting.split)}


_POINTS = {
    "Preparing chunks behind similar ones scores higher than plain reuse": (PREPARED, REUSE),
    "Selection alone scores higher than plain reuse": (SELECTED, REUSE),
    "Preparation adds to selection": (BOTH, SELECTED),
    "Selection adds to preparation": (BOTH, PREPARED),
}


def _pair(mine: str, theirs: str) -> Pair:
    return Pair((mine, RUNS[mine]), (theirs, RUNS[theirs]))


def verdicts(result: Result) -> list[Verdict]:
    """Each step, and how much of full attention's gain both restore together."""
    found = [one for said, names in _POINTS.items() for one in better(said, gain_of(result, _pair(*names)))]
    both = row_of(result, BOTH, RATIO)
    if both is not None and both["normalised"] is not None:
        restored = estimate(both, "normalised")
        held = True if restored.low >= 0.8 else False if restored.high < 0.8 else None
        found.append(
            Verdict(
                held,
                f"Both together restore most of what full attention gains over reuse: {spoken(restored)}.",
            )
        )
    return found


def draw(result: Result, theme: Theme) -> Figure:
    """A bar for each step, a panel for the mean and for each task."""
    panels = {
        task: {
            name: estimate(row, "score")
            for name, ratio in RUNS.items()
            if (row := row_of(result, name, ratio, task=task)) is not None
        }
        for task in [OVERALL, *tasks_of(result)]
    }
    heading = (f"FusionRAG part by part, ratio {RATIO:g}", "512 tokens of context · lines: 95 % interval")
    return bars(heading, panels, list(RUNS), "score", theme)


CLAIM = Claim(
    name="fusionrag-parts",
    title="FusionRAG component by component",
    paper="FusionRAG §5.3.3, fig. 18 (answer quality; its other parts are about time)",
    says="Selection by the question alone restores 72 % of what full attention gains over full reuse, and preparation behind similar"
    " chunks brings that to 99 %.",
    tried=f"Plain reuse, preparation alone, selection alone at ratio {RATIO:g}, and both. Most is taken to be four fifths.",
    grids=grids,
    figures=lambda found: answered(found, [_pair(*names) for names in _POINTS.values()]),
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
