"""What each part of CacheClip is worth: windows, shared prefix, fine-tuning (CacheClip)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheclip import AuxiliaryWindows
from kvweave.recipes.prepare import Bare
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
    tasks_of,
)
from papers.figures import bars
from side_by_side import Grid

RATIO = 0.2
WHOLE = "cacheclip"
FILLED = "cacheclip-refill"
NO_WINDOWS = "cacheclip without windows"
NO_PREFIX = "cacheclip without shared prefix"
TUNED = "cacheclip, auxiliary fine-tuned"


@dataclass(frozen=True)
class Parts:
    """CacheClip as it is, and with one part taken away; with a fine-tuned auxiliary model where there is one."""

    tuned: str | None

    def __call__(self) -> Mapping[str, Recipe]:
        """Recipes by name."""
        whole = recipe_named(WHOLE)
        made = {
            WHOLE: whole,
            FILLED: recipe_named(FILLED),
            NO_WINDOWS: replace(whole, select=AuxiliaryWindows(window=1, more_than=0, refill=True)),
            NO_PREFIX: replace(whole, prepare=Bare()),
        }
        return made | ({TUNED: recipe_named(WHOLE, auxiliary=self.tuned)} if self.tuned else {})


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Tasks on which plain reuse loses something; on single facts, as in the paper, it loses nothing here."""
    tasks = ("vartrack", "coref", "contradiction", "order")
    suite = replace(SUITE, tasks=tasks, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(Parts(setting.tuned), suite, setting.split)}


_POINTS = {
    "`cacheclip` scores higher with windows than without, though it recomputes fewer rows": (
        WHOLE,
        NO_WINDOWS,
    ),
    "It scores higher with windows than without when both recompute as many rows": (FILLED, NO_WINDOWS),
    "It scores higher on chunks prepared behind the shared prefix than on chunks prepared alone": (
        WHOLE,
        NO_PREFIX,
    ),
    "It scores higher with the auxiliary model fine-tuned towards the answering one, and more rows left by its windows, than with the shipped one": (
        TUNED,
        WHOLE,
    ),
}


def _pair(mine: str, theirs: str) -> Pair:
    return Pair((mine, RATIO), (theirs, RATIO))


def verdicts(result: Result) -> list[Verdict]:
    """A point for each part that was measured."""
    return [one for said, names in _POINTS.items() for one in better(said, gain_of(result, _pair(*names)))]


def draw(result: Result, theme: Theme) -> Figure:
    """A bar for each variant, a panel for the mean and for each task."""
    names = [FULL, *Parts("any")(), REUSE]
    at = {FULL: 1.0, REUSE: 0.0}
    panels = {
        task: {
            name: estimate(row, "score")
            for name in names
            if (row := row_of(result, name, at.get(name, RATIO), task=task)) is not None
        }
        for task in [OVERALL, *tasks_of(result)]
    }
    shown = [name for name in names if name in panels[OVERALL]]
    heading = (f"CacheClip part by part, ratio {RATIO:g}", "512 tokens of context · lines: 95 % interval")
    return bars(heading, panels, shown, "score", theme)


CLAIM = Claim(
    name="cacheclip-parts",
    title="CacheClip without its parts",
    paper="CacheClip §3.1 (shared prefix), §3.3 (windows), §3.5 (fine-tuning)",
    says="Windows, a prefix that all chunks are prepared behind, and an auxiliary model fine-tuned towards the one that answers each"
    " add to the score.",
    tried=f"`cacheclip` at ratio {RATIO:g}, and the same with one part taken away. The shipped auxiliary model has already been trained to"
    " look where a reference model looks; fine-tuning is what `kvweave train-selector` adds.",
    grids=grids,
    figures=lambda found: answered(found, [_pair(*names) for names in _POINTS.values()]),
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
