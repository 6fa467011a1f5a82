"""A claim of a paper: how it is measured, and how its numbers are stored and evaluated. Has no claim itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

import recipe_grid
from kvweave_lab.eval.comparisons import difference
from kvweave_lab.eval.grid import Suite
from kvweave_lab.eval.outcomes import FULL, REUSE, Label, Outcome
from kvweave_lab.eval.rows import OVERALL, Row, summary_rows
from kvweave_lab.report.figures import Theme
from kvweave_lab.statistics import GAIN, Estimate
from recipe_grid import Grid

Result = Mapping[str, Any]
"""A claim's stored numbers, as `Claim.numbers` returns them."""

SUITE = Suite(
    tasks=(), context_tokens=(512,), chunk_tokens=96, recipes=(), ratios=(), seeds=(0,), samples=200
)
"""The default grid of a claim."""


LACKING_TASKS = ("vartrack", "coref", "contradiction", "order")
"""Tasks on which plain reuse lacks information from other chunks, and so scores lower than full attention."""


@dataclass(frozen=True)
class Setting:
    """Settings of all claims; `tuned` is a folder that `kvweave train-selector` wrote."""

    split: str
    samples: int
    tuned: str | None = None


def halved(samples: int) -> int:
    """Return the number of prompts for each of two seeds, so that two processes share a claim with one task."""
    return -(-samples // 2)


class Verdict(NamedTuple):
    """A statement of a claim: True if it held here, False if the opposite did, None if neither is certain.

    `judged` is False where one of the compared recipes has an advantage that the claim is not about.
    """

    held: bool | None
    statement: str
    judged: bool = True


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        name: on the command line and in file names.
        title: a few words.
        paper: name and section.
        finding: the paper's finding, in a sentence.
        setup: what is measured here.
        grids: returns the parts of the run by name; a single part has an empty name.
        numbers: returns the stored numbers from the results by part.
        verdicts: returns what the numbers say; leaves out statements without numbers.
        table: returns the numbers as lines of Markdown.
        draw: returns the numbers as a figure.
        measure: runs a part and returns its results; outcomes by default.
    """

    name: str
    title: str
    paper: str
    finding: str
    setup: str
    grids: Callable[[Setting], Mapping[str, Grid]]
    numbers: Callable[[Mapping[str, Sequence[Any]]], Result]
    verdicts: Callable[[Result], list[Verdict]]
    table: Callable[[Result], list[str]]
    draw: Callable[[Result, Theme], Figure]
    measure: Callable[[Grid, Path, int], Sequence[Any]] = recipe_grid.run


class Pair(NamedTuple):
    """Two runs on a part's prompts, as recipe and ratio, whose scores are compared."""

    first: tuple[str, float]
    second: tuple[str, float]


def score_numbers(found: Mapping[str, Sequence[Outcome]], pairs: Sequence[Pair]) -> Result:
    """Return the scores of all runs and the paired gains of some, for all tasks and each task."""
    scores, gains = [], []
    for part, outcomes in found.items():
        rows = summary_rows(outcomes)
        scores += [_score_row(part, row) for row in rows]
        for task in dict.fromkeys(row.task for row in rows):
            of_task = [outcome for outcome in outcomes if task in (OVERALL, outcome.task)]
            for pair in pairs:
                gain = difference(of_task, label(pair.first), label(pair.second))
                if gain is not None:
                    gains.append(
                        {
                            "part": part,
                            "task": task,
                            "mine": pair.first,
                            "theirs": pair.second,
                            **estimate_json("gain", gain),
                        }
                    )
    return {"rows": scores, "gains": gains}


def _score_row(part: str, row: Row) -> dict[str, Any]:
    return {
        "part": part,
        "task": row.task,
        "recipe": row.recipe,
        "ratio": row.ratio,
        "samples": row.samples,
        **estimate_json("score", row.score),
        **(estimate_json("normalised", row.normalised) if row.normalised else {"normalised": None}),
        **estimate_json("lost", row.lost),
        "computed": row.rows.value,
    }


def label(run: tuple[str, float]) -> Label:
    """Return the label of a run in outcomes."""
    recipe, ratio = run
    return recipe, float(ratio), None


def estimate_json(name: str, estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON values."""
    return {name: estimate.value, f"{name}_interval": [estimate.low, estimate.high]}


def estimate(content: Mapping[str, Any], name: str) -> Estimate:
    """Return an estimate from its JSON values."""
    return Estimate(content[name], *content[f"{name}_interval"])


def row_of(
    result: Result, recipe: str, ratio: float, *, part: str = "", task: str = OVERALL
) -> Mapping[str, Any] | None:
    """Return a run's scores; None if it was not measured."""
    wanted = (part, task, recipe, ratio)
    rows: list[Mapping[str, Any]] = result["rows"]
    return next((r for r in rows if (r["part"], r["task"], r["recipe"], r["ratio"]) == wanted), None)


def score_of(
    result: Result, recipe: str, ratio: float, *, part: str = "", task: str = OVERALL, what: str = "score"
) -> Estimate:
    """Return a number of a run that every measurement contains."""
    row = row_of(result, recipe, ratio, part=part, task=task)
    assert row is not None, f"{recipe} at {ratio} was not measured"
    return estimate(row, what)


def gain_of(result: Result, pair: Pair, *, part: str = "", task: str = OVERALL) -> Estimate | None:
    """Return the score of a pair's first run minus the second's; None if one was not measured."""
    wanted = [part, task, list(pair.first), list(pair.second)]
    for row in result["gains"]:
        if [row["part"], row["task"], list(row["mine"]), list(row["theirs"])] == wanted:
            return estimate(row, "gain")
    return None


def gain_verdicts(result: Result, points: Mapping[str, Pair]) -> list[Verdict]:
    """Return the verdict on each statement that a pair's first run is better; nothing for pairs not measured."""
    return [
        verdict for statement, pair in points.items() for verdict in better(statement, gain_of(result, pair))
    ]


def better(statement: str, gain: Estimate | None) -> list[Verdict]:
    """Return the verdict on a statement that something is better, by its gain; nothing if it was not measured."""
    if gain is None:
        return []
    held = True if gain.low > 0 else False if gain.high < 0 else None
    return [Verdict(held, f"{statement}: {with_interval(gain, '+.3f')}.")]


def with_interval(number: Estimate, form: str = ".3f") -> str:
    """Return a number with its interval as text."""
    return f"{number.value:{form}} ({number.low:{form}} to {number.high:{form}})"


def baselines(result: Result, part: str = "", task: str = OVERALL) -> tuple[Estimate, Estimate]:
    """Return the scores of full attention and plain reuse."""
    full = score_of(result, FULL, 1.0, part=part, task=task)
    return full, score_of(result, REUSE, 0.0, part=part, task=task)


def baseline_lines(result: Result) -> list[str]:
    """Return a line for each part with the scores of full attention and plain reuse, and a note if they are close."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in result.get("rows", ())):
        full, reuse = baselines(result, part)
        close = full.value - reuse.value < GAIN
        lines.append(
            f"{f'Chunks of {part} tokens: full' if part else 'Full'} attention scores {with_interval(full)}, plain reuse {with_interval(reuse)}"
            + (": there is little to win back." if close else ".")
        )
    return lines


def tasks_of(result: Result) -> list[str]:
    """Return the tasks, without the mean over tasks."""
    return [task for task in dict.fromkeys(row["task"] for row in result["rows"]) if task != OVERALL]


def score_panels(result: Result, runs: Mapping[str, float]) -> dict[str, dict[str, Estimate]]:
    """Return the scores of measured runs, recipes with their ratios, for the mean over tasks and each task."""
    return {
        task: {
            name: estimate(row, "score")
            for name, ratio in runs.items()
            if (row := row_of(result, name, ratio, task=task)) is not None
        }
        for task in [OVERALL, *tasks_of(result)]
    }


def baselines_by_task(result: Result) -> dict[str, dict[str, Estimate]]:
    """Return the scores of full attention and plain reuse for each task, as lines of a figure."""
    return {
        task: dict(zip(("full attention", "reuse"), baselines(result, task=task), strict=True))
        for task in tasks_of(result)
    }


def score_table(result: Result, *, parts: Mapping[str, str] | None = None) -> list[str]:
    """Return a table with a line for each recipe and ratio, and a column for each task and their mean.

    `parts` are the displayed names of the parts, if there are several.
    """
    tasks = [*tasks_of(result), OVERALL]
    shown = tasks if len(tasks) > 2 else tasks[:1]
    head = [*(["chunks"] if parts else []), "recipe", "ratio", *shown, "context tokens computed"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    runs = dict.fromkeys((row["part"], row["recipe"], row["ratio"]) for row in result["rows"])
    for part, recipe, ratio in runs:
        found = [row_of(result, recipe, ratio, part=part, task=task) for task in shown]
        overall = row_of(result, recipe, ratio, part=part)
        assert overall is not None
        cells = [with_interval(estimate(row, "score")) if row else "–" for row in found]
        named = [parts[part]] if parts else []
        computed = f"{overall['computed']:.0f}"
        lines.append(f"| {' | '.join([*named, f'`{recipe}`', f'{ratio:g}', *cells, computed])} |")
    return lines
