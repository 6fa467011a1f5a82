"""A claim of a paper, what runs to see it, and how its numbers are kept and read. Knows no claim by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import side_by_side
from kvweave_lab.eval.comparison import difference
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import FULL, REUSE, Estimate, Label, Outcome, Row
from kvweave_lab.eval.statistics import GAIN
from kvweave_lab.eval.suites import Suite
from kvweave_lab.eval.summary import OVERALL, rows
from side_by_side import Grid

Result = Mapping[str, Any]
"""A claim's numbers as they are kept: what `figures` made of a run."""

SUITE = Suite(
    tasks=(), context_tokens=(512,), chunk_tokens=96, recipes=(), ratios=(), seeds=(0,), samples=200
)
"""What claims run unless they say otherwise."""


@dataclass(frozen=True)
class Setting:
    """What all claims of a run have in common; `tuned` is a folder that `kvweave train-selector` left, if there is one."""

    split: str
    samples: int
    tuned: str | None = None


def halved(samples: int) -> int:
    """Prompts for each of two seeds, so that two processes share the work of a claim with one task."""
    return -(-samples // 2)


class Verdict(NamedTuple):
    """A point of a claim: True if it held here, False if the opposite did, None if neither is certain."""

    held: bool | None
    said: str


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        name: on the command line and in the names of files.
        title: a few words.
        paper: where it stands.
        says: what the paper saw, in a sentence.
        tried: what runs here.
        grids: the parts of the run by name; an only part has no name.
        figures: from what ran, by part, to the numbers that are kept.
        verdicts: what the numbers say; none where the numbers for a point are missing.
        table: the numbers as lines of Markdown.
        draw: the numbers as a figure.
        measure: what a part's run gives; answers, unless a claim is about something else.
    """

    name: str
    title: str
    paper: str
    says: str
    tried: str
    grids: Callable[[Setting], Mapping[str, Grid]]
    figures: Callable[[Mapping[str, Sequence[Any]]], Result]
    verdicts: Callable[[Result], list[Verdict]]
    table: Callable[[Result], list[str]]
    draw: Callable[[Result, Theme], Figure]
    measure: Callable[[Grid, Path, int], Sequence[Any]] = side_by_side.run


class Pair(NamedTuple):
    """Two runs of a part's prompts whose scores are compared."""

    mine: tuple[str, float]
    theirs: tuple[str, float]


def answered(found: Mapping[str, Sequence[Outcome]], pairs: Sequence[Pair]) -> Result:
    """Scores of everything that ran, and the paired differences of some; over all tasks and for each of them."""
    scored, compared = [], []
    for part, outcomes in found.items():
        made = rows(outcomes)
        scored += [_scored(part, row) for row in made]
        for task in dict.fromkeys(row.task for row in made):
            here = [outcome for outcome in outcomes if task in (OVERALL, outcome.task)]
            for pair in pairs:
                gain = difference(here, label(pair.mine), label(pair.theirs))
                if gain is not None:
                    compared.append(
                        {
                            "part": part,
                            "task": task,
                            "mine": pair.mine,
                            "theirs": pair.theirs,
                            **plain("gain", gain),
                        }
                    )
    return {"rows": scored, "gains": compared}


def _scored(part: str, row: Row) -> dict[str, Any]:
    return {
        "part": part,
        "task": row.task,
        "recipe": row.recipe,
        "ratio": row.ratio,
        "samples": row.samples,
        **plain("score", row.score),
        **(plain("normalised", row.normalised) if row.normalised else {"normalised": None}),
        **plain("lost", row.lost),
        "computed": row.rows.value,
    }


def label(run: tuple[str, float]) -> Label:
    """How outcomes name a run."""
    recipe, ratio = run
    return recipe, float(ratio), None


def plain(name: str, estimate: Estimate) -> dict[str, Any]:
    """An estimate for JSON."""
    return {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}


def estimate(kept: Mapping[str, Any], name: str) -> Estimate:
    """And back."""
    return Estimate(kept[name], *kept[f"{name}_interval"])


def row_of(
    result: Result, recipe: str, ratio: float, *, part: str = "", task: str = OVERALL
) -> Mapping[str, Any] | None:
    """A run's scores, if it ran."""
    wanted = (part, task, recipe, ratio)
    found: list[Mapping[str, Any]] = result["rows"]
    return next((r for r in found if (r["part"], r["task"], r["recipe"], r["ratio"]) == wanted), None)


def score_of(
    result: Result, recipe: str, ratio: float, *, part: str = "", task: str = OVERALL, what: str = "score"
) -> Estimate:
    """What a run that every measurement has came to."""
    row = row_of(result, recipe, ratio, part=part, task=task)
    assert row is not None, f"{recipe} at {ratio} was not measured"
    return estimate(row, what)


def gain_of(result: Result, pair: Pair, *, part: str = "", task: str = OVERALL) -> Estimate | None:
    """How much higher the first of a pair scores than the second, if both ran."""
    wanted = [part, task, list(pair.mine), list(pair.theirs)]
    for kept in result["gains"]:
        if [kept["part"], kept["task"], list(kept["mine"]), list(kept["theirs"])] == wanted:
            return estimate(kept, "gain")
    return None


def better(what: str, gain: Estimate | None) -> list[Verdict]:
    """The verdict on a claim that something is better, from how much better it is; none if that was not measured."""
    if gain is None:
        return []
    held = True if gain.low > 0 else False if gain.high < 0 else None
    return [Verdict(held, f"{what}: {spoken(gain, '+.3f')}.")]


def spoken(found: Estimate, form: str = ".3f") -> str:
    """A number with its interval."""
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


def baselines(result: Result, part: str = "", task: str = OVERALL) -> tuple[Estimate, Estimate]:
    """What full attention and plain reuse score."""
    full = score_of(result, FULL, 1.0, part=part, task=task)
    return full, score_of(result, REUSE, 0.0, part=part, task=task)


def room(result: Result) -> list[str]:
    """What full attention and plain reuse score, part by part, and where there is next to nothing between them."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in result.get("rows", ())):
        full, reuse = baselines(result, part)
        little = full.value - reuse.value < GAIN
        lines.append(
            f"{f'Chunks of {part} tokens: full' if part else 'Full'} attention scores {spoken(full)}, plain reuse {spoken(reuse)}"
            + (": there is little to win back." if little else ".")
        )
    return lines


def tasks_of(result: Result) -> list[str]:
    """The tasks, without what they come to."""
    return [task for task in dict.fromkeys(row["task"] for row in result["rows"]) if task != OVERALL]


def score_table(result: Result, *, parts: Mapping[str, str] | None = None) -> list[str]:
    """A line for each recipe and ratio, a column for each task and their mean; `parts` names the parts, if there are several."""
    tasks = [*tasks_of(result), OVERALL]
    shown = tasks if len(tasks) > 2 else tasks[:1]
    head = [*(["chunks"] if parts else []), "recipe", "ratio", *shown, "context tokens computed"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    runs = dict.fromkeys((row["part"], row["recipe"], row["ratio"]) for row in result["rows"])
    for part, recipe, ratio in runs:
        found = [row_of(result, recipe, ratio, part=part, task=task) for task in shown]
        overall = row_of(result, recipe, ratio, part=part)
        assert overall is not None
        cells = [spoken(estimate(row, "score")) if row else "–" for row in found]
        named = [parts[part]] if parts else []
        computed = f"{overall['computed']:.0f}"
        lines.append(f"| {' | '.join([*named, f'`{recipe}`', f'{ratio:g}', *cells, computed])} |")
    return lines
