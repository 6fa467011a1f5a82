"""The number of similar chunks that precede a chunk in its preparation (FusionRAG)."""

from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import Isolated, Similar
from kvweave.recipes.recipe import Recipe
from kvweave_lab.report.figures import Theme
from papers.claim import (
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    baselines_by_task,
    better,
    gain_of,
    score_numbers,
    score_of,
    score_table,
    tasks_of,
)
from papers.plots import curves
from recipe_grid import Grid

COUNTS = (0, 5, 10, 15)
RATIOS = (0.0, 0.05, 0.15)


def name(count: int) -> str:
    return f"fusionrag-alone, {count} neighbours"


def variants() -> Mapping[str, Recipe]:
    """Return FusionRAG's selection on chunks prepared after 0 or more similar ones."""
    fusionrag = recipe_named("fusionrag-alone")
    return {name(n): replace(fusionrag, prepare=Similar(n) if n else Isolated()) for n in COUNTS}


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return tasks on which plain reuse lacks information from other chunks."""
    suite = replace(
        SUITE, tasks=("vartrack", "coref", "contradiction"), ratios=RATIOS, samples=setting.samples
    )
    return {"": Grid(variants, suite, setting.split)}


def _pair(many: int, few: int, ratio: float) -> Pair:
    return Pair((name(many), ratio), (name(few), ratio))


def verdicts(result: Result) -> list[Verdict]:
    """Compare 10 neighbours with none at every ratio, and with 15 at a small one."""
    found = []
    for ratio in RATIOS:
        found += better(
            f"At {ratio:.0%}, 10 neighbours score higher than none", gain_of(result, _pair(10, 0, ratio))
        )
    gain = gain_of(result, _pair(10, 15, 0.05))
    return found + better("At 5%, 10 neighbours score higher than 15", gain)


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure of the score by number of neighbours, with a curve for each ratio."""
    panels = {
        task: {
            f"ratio {ratio:g}": {n: score_of(result, name(n), ratio, task=task) for n in COUNTS}
            for ratio in RATIOS
        }
        for task in tasks_of(result)
    }
    heading = ("FusionRAG by neighbours at preparation", "512 tokens of context · bands: 95 % interval")
    return curves(
        heading,
        panels,
        ("similar chunks before a chunk in its preparation", "score"),
        theme,
        baselines_by_task(result),
    )


CLAIM = Claim(
    name="neighbours",
    title="How many neighbours",
    paper="FusionRAG §5.3.2, fig. 17",
    finding="Preparing a chunk after its ten most similar ones is best; with fifteen, the score falls again as soon as 5 % are recomputed.",
    setup="`fusionrag-alone` with 0, 5, 10 and 15 neighbours out of a knowledge base of 17 documents.",
    grids=grids,
    numbers=lambda found: score_numbers(
        found,
        [_pair(many, few, ratio) for ratio in RATIOS for many, few in ((5, 0), (10, 0), (10, 5), (10, 15))],
    ),
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
