"""Rows: outcomes summed up by task, length, recipe and budget; and selections of rows, in the evaluation's order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave_lab.eval.outcomes import FULL, REUSE, Label, Outcome
from kvweave_lab.statistics import Estimate, Scores, interval_over_tasks, ratio_over_tasks

OVERALL = "overall"
"""The task of rows over all tasks."""


@dataclass(frozen=True, slots=True)
class Row:
    """All prompts of one task and length under one recipe with one budget; intervals by bootstrap over prompts.

    Two runs of a prompt are resampled in pairs: `lost` = full_score - score, and `normalised` = (score - reuse_score)
    / (full_score - reuse_score) (FusionRAG eq. 11), None if full attention gains less than 0.1 over reuse. `rows` is
    the number of context tokens computed per prompt, without the system prefix and the question. `task` "overall" is
    the mean over tasks; its `normalised` is the ratio of means over tasks with a gain of at least 0.1. Either `ratio`
    or `coverage` is None, as in an Outcome.
    """

    task: str
    context_tokens: int
    recipe: str
    ratio: float | None
    samples: int
    score: Estimate
    full_score: Estimate
    reuse_score: Estimate
    lost: Estimate
    normalised: Estimate | None
    agreement: Estimate
    kl: Estimate
    faithfulness: Estimate
    rows: Estimate
    selection: Estimate | None
    coverage: float | None = None

    @property
    def series(self) -> str:
        """The recipe's name in tables and figures, where a recipe by coverage is another series than by ratio."""
        return self.recipe if self.coverage is None else f"{self.recipe} by coverage"

    @property
    def budget(self) -> float:
        """The requested ratio or coverage."""
        budget = self.ratio if self.coverage is None else self.coverage
        assert budget is not None
        return budget


def summary_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row per task, length, recipe and budget, and an "overall" one per length, recipe and budget.

    Rows are ordered by length, task ("overall" last), recipe and budget, ratios before coverages. Tasks and recipes
    keep the order of their first outcome. Every sample must have an outcome under full attention and one under reuse
    at ratio 0.
    """
    baselines = _Baselines(
        {outcome.sample: outcome for outcome in outcomes if outcome.recipe == FULL},
        {outcome.sample: outcome for outcome in outcomes if (outcome.recipe, outcome.ratio) == (REUSE, 0)},
    )
    cells: dict[_Cell, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        cell = _Cell(outcome.context_tokens, outcome.label)
        cells.setdefault(cell, {}).setdefault(outcome.task, []).append(outcome)
    rows = []
    for cell, tasks in cells.items():
        rows += [_row(task, cell, [group], baselines) for task, group in tasks.items()]
        rows.append(_row(OVERALL, cell, list(tasks.values()), baselines))
    places = {name: place for place, name in enumerate(dict.fromkeys(outcome.task for outcome in outcomes))}
    places[OVERALL] = len(places)
    recipes = list(dict.fromkeys(outcome.recipe for outcome in outcomes))
    return sorted(
        rows,
        key=lambda row: (
            row.context_tokens,
            places[row.task],
            recipes.index(row.recipe),
            row.coverage is not None,
            row.budget,
        ),
    )


def context_lengths(rows: Sequence[Row]) -> list[int]:
    """Return the context lengths, shortest first; samples from a file have length 0."""
    return sorted({row.context_tokens for row in rows})


def rows_at_length(rows: Sequence[Row], context_tokens: int) -> list[Row]:
    """Return the rows of one context length."""
    return [row for row in rows if row.context_tokens == context_tokens]


def task_names(rows: Sequence[Row]) -> list[str]:
    """Return the tasks, without `overall`."""
    return [task for task in dict.fromkeys(row.task for row in rows) if task != OVERALL]


def panel_names(rows: Sequence[Row]) -> list[str]:
    """Return the tasks, after `overall` where there are several."""
    named = task_names(rows)
    return [OVERALL, *named] if len(named) != 1 and rows_of_task(rows, OVERALL) else named


def rows_of_task(rows: Sequence[Row], task: str) -> list[Row]:
    """Return the rows of one task."""
    return [row for row in rows if row.task == task]


def overall_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the mean over tasks, or of the only task; empty if there is neither."""
    return rows_of_task(rows, panel_names(rows)[0] if len(task_names(rows)) <= 1 else OVERALL)


def series_names(rows: Sequence[Row]) -> list[str]:
    """Return the series: recipes, each by ratio and by coverage."""
    return list(dict.fromkeys(row.series for row in rows))


def rows_by_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return each series' rows by rising budget."""
    return {
        series: sorted((row for row in rows if row.series == series), key=lambda row: row.budget)
        for series in series_names(rows)
    }


def is_swept(rows: Sequence[Row]) -> bool:
    """Return whether a line through one series' rows means something.

    A recipe that recomputes nothing or everything has rows at 0 and 1 and none between them.
    """
    return len(rows) > 1 and any(0 < row.budget < 1 for row in rows)


def length_text(context_tokens: int) -> str:
    """Return a context length in words."""
    return f"{context_tokens:,} tokens of context" if context_tokens else "samples from a file"


class _Cell(NamedTuple):
    """What identifies a row besides its task."""

    context_tokens: int
    label: Label


class _Baselines(NamedTuple):
    """Outcomes by sample name."""

    full: Mapping[str, Outcome]
    reuse: Mapping[str, Outcome]


def _row(task: str, cell: _Cell, groups: Sequence[Sequence[Outcome]], baselines: _Baselines) -> Row:
    """Return the row over groups of outcomes, one group per task; a task's own row has one group."""
    recipe, ratio, coverage = cell.label
    full = [[_baseline_of(outcome, baselines.full, FULL) for outcome in group] for group in groups]
    reuse = [[_baseline_of(outcome, baselines.reuse, REUSE) for outcome in group] for group in groups]
    scores = [
        Scores(_scores(group), _scores(truth), _scores(stale))
        for group, truth, stale in zip(groups, full, reuse, strict=True)
    ]
    return Row(
        task=task,
        context_tokens=cell.context_tokens,
        recipe=recipe,
        ratio=ratio,
        coverage=coverage,
        samples=sum(len(group) for group in groups),
        score=_mean(groups, lambda outcome: outcome.score),
        full_score=_mean(full, lambda outcome: outcome.score),
        reuse_score=_mean(reuse, lambda outcome: outcome.score),
        lost=interval_over_tasks([_lost(*pair) for pair in zip(groups, full, strict=True)]),
        normalised=ratio_over_tasks(scores),
        agreement=_mean(groups, lambda outcome: outcome.agreement),
        kl=_mean(groups, lambda outcome: outcome.kl),
        faithfulness=_mean(groups, lambda outcome: outcome.faithfulness),
        rows=_mean(groups, lambda outcome: outcome.rows),
        selection=_mean_selection(groups),
    )


def _baseline_of(outcome: Outcome, baseline: Mapping[str, Outcome], name: str) -> Outcome:
    assert outcome.sample in baseline, f"sample {outcome.sample} has no outcome under {name}"
    return baseline[outcome.sample]


def _lost(group: Sequence[Outcome], full: Sequence[Outcome]) -> list[float]:
    """Return the loss of each prompt against full attention, as differences, so that resamples stay paired."""
    return [truth.score - own.score for own, truth in zip(group, full, strict=True)]


def _scores(group: Sequence[Outcome]) -> list[float]:
    return [outcome.score for outcome in group]


def _mean(groups: Sequence[Sequence[Outcome]], value: Callable[[Outcome], float]) -> Estimate:
    return interval_over_tasks([[value(outcome) for outcome in group] for group in groups])


def _mean_selection(groups: Sequence[Sequence[Outcome]]) -> Estimate | None:
    """Return the mean over tasks, of the outcomes with selected rows; None if there are none."""
    selected = [[o.selection for o in group if o.selection is not None] for group in groups]
    shares = [values for values in selected if values]
    return interval_over_tasks(shares) if shares else None
