"""The gain of each component of CacheClip: windows, shared prefix, fine-tuning (CacheClip)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.methods.cacheclip import AuxiliaryWindows
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.outcomes import FULL, REUSE
from kvweave_lab.eval.rows import OVERALL
from kvweave_lab.report.figures import Theme
from papers.claim import (
    LACKING_TASKS,
    SUITE,
    Claim,
    Pair,
    Result,
    Setting,
    Verdict,
    better,
    gain_of,
    row_of,
    score_numbers,
    score_panels,
    score_table,
)
from papers.plots import bars
from recipe_grid import Grid

RATIO = 0.2
WHOLE = "cacheclip-windows"
FILLED = "cacheclip"
NO_WINDOWS = "cacheclip without windows"
NO_PREFIX = "cacheclip-windows without shared prefix"
TUNED = "cacheclip-windows, auxiliary fine-tuned"


@dataclass(frozen=True)
class Variants:
    """CacheClip, CacheClip without each component, and with a fine-tuned auxiliary model if there is one."""

    tuned: str | None

    def __call__(self) -> Mapping[str, Recipe]:
        """Return recipes by name."""
        whole = recipe_named(WHOLE)
        recipes = {
            WHOLE: whole,
            FILLED: recipe_named(FILLED),
            NO_WINDOWS: replace(whole, select=AuxiliaryWindows(window=1, more_than=0, refill=True)),
            NO_PREFIX: replace(whole, prepare=Bare()),
        }
        return recipes | ({TUNED: recipe_named(WHOLE, auxiliary=self.tuned)} if self.tuned else {})


def grids(setting: Setting) -> Mapping[str, Grid]:
    """Return tasks on which plain reuse scores lower than full attention; on the paper's single facts it does not."""
    suite = replace(SUITE, tasks=LACKING_TASKS, ratios=(RATIO,), samples=setting.samples)
    return {"": Grid(Variants(setting.tuned), suite, setting.split)}


def _pair(first: str, second: str) -> Pair:
    return Pair((first, RATIO), (second, RATIO))


_POINTS = {
    "`cacheclip-windows` scores higher with windows than without, though it recomputes fewer rows": _pair(
        WHOLE, NO_WINDOWS
    ),
    "It scores higher with windows than without when both recompute as many rows": _pair(FILLED, NO_WINDOWS),
    "It scores higher on chunks prepared after the shared prefix than on chunks prepared alone": _pair(
        WHOLE, NO_PREFIX
    ),
    "It scores higher with a fine-tuned auxiliary model, whose windows leave more rows, than with the shipped one": _pair(
        TUNED, WHOLE
    ),
}


def verdicts(result: Result) -> list[Verdict]:
    """Return what the gains say; a gain of the recipe that recomputes more tokens has no verdict."""
    return [
        _without_advantage(result, pair, verdict)
        for statement, pair in _POINTS.items()
        for verdict in better(statement, gain_of(result, pair))
    ]


def _without_advantage(result: Result, pair: Pair, verdict: Verdict) -> Verdict:
    if verdict.held is None:
        return verdict
    winner, loser = (pair.first, pair.second) if verdict.held else (pair.second, pair.first)
    more, less = (_computed(result, run) for run in (winner, loser))
    if more <= less:
        return verdict
    return Verdict(
        None,
        f"{verdict.statement} `{winner[0]}` recomputes {more:.0f} tokens, `{loser[0]}` {less:.0f}.",
        judged=False,
    )


def _computed(result: Result, run: tuple[str, float]) -> float:
    row = row_of(result, *run)
    assert row is not None, f"{run} was not measured"
    return float(row["computed"])


def draw(result: Result, theme: Theme) -> Figure:
    """Return a figure with a bar for each variant, and a panel for the mean and each task."""
    panels = score_panels(result, {FULL: 1.0, **dict.fromkeys(Variants("any")(), RATIO), REUSE: 0.0})
    shown = list(panels[OVERALL])
    heading = (f"CacheClip part by part, ratio {RATIO:g}", "512 tokens of context · lines: 95 % interval")
    return bars(heading, panels, shown, "score", theme)


CLAIM = Claim(
    name="cacheclip-parts",
    title="CacheClip without its parts",
    paper="CacheClip §3.1 (shared prefix), §3.3 (windows), §3.5 (fine-tuning)",
    finding="Windows, a shared prefix before every chunk, and an auxiliary model fine-tuned towards the one that answers each"
    " add to the score.",
    setup=f"`cacheclip-windows` at ratio {RATIO:g}, and the same without one component; `cacheclip` spends the budget that windows leave. The shipped auxiliary model was already trained to"
    " attend like a reference model; fine-tuning is by `kvweave train-selector`.",
    grids=grids,
    numbers=lambda found: score_numbers(found, list(_POINTS.values())),
    verdicts=verdicts,
    table=score_table,
    draw=draw,
)
