"""Outcomes become rows: a task, a length, a recipe and a budget each, and what they come to over all tasks."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvweave_lab.eval.results import FULL, REUSE, Estimate, Label, Outcome, Row
from kvweave_lab.eval.statistics import Scores, interval_over_tasks, ratio_over_tasks

OVERALL = "overall"

Value = Callable[[Outcome], float]


class _Cell(NamedTuple):
    """What one row is about, save for its task."""

    context_tokens: int
    label: Label


class _Baselines(NamedTuple):
    """Outcomes by sample name."""

    full: Mapping[str, Outcome]
    reuse: Mapping[str, Outcome]


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per task, length, recipe and budget, and an "overall" one per length, recipe and budget.

    Rows are ordered by length, task ("overall" last), recipe and budget, ratios before coverages; tasks and recipes stand
    in the order in which they first occur. Every sample must have an outcome under full attention and under reuse at ratio 0.
    """
    baselines = _Baselines(
        {outcome.sample: outcome for outcome in outcomes if outcome.recipe == FULL},
        {outcome.sample: outcome for outcome in outcomes if (outcome.recipe, outcome.ratio) == (REUSE, 0)},
    )
    cells: dict[_Cell, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        cell = _Cell(outcome.context_tokens, outcome.label)
        cells.setdefault(cell, {}).setdefault(outcome.task, []).append(outcome)
    made = []
    for cell, tasks in cells.items():
        made += [_row(task, cell, [group], baselines) for task, group in tasks.items()]
        made.append(_row(OVERALL, cell, list(tasks.values()), baselines))
    places = {name: place for place, name in enumerate(dict.fromkeys(outcome.task for outcome in outcomes))}
    places[OVERALL] = len(places)
    recipes = list(dict.fromkeys(outcome.recipe for outcome in outcomes))
    return sorted(
        made,
        key=lambda row: (
            row.context_tokens,
            places[row.task],
            recipes.index(row.recipe),
            row.coverage is not None,
            row.budget,
        ),
    )


def _row(task: str, cell: _Cell, groups: Sequence[Sequence[Outcome]], baselines: _Baselines) -> Row:
    """The row over groups, one per task; a task's own row has its one group."""
    recipe, ratio, coverage = cell.label
    full = [[_beside(outcome, baselines.full, FULL) for outcome in group] for group in groups]
    reuse = [[_beside(outcome, baselines.reuse, REUSE) for outcome in group] for group in groups]
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
        selection=_selection(groups),
    )


def _beside(outcome: Outcome, baseline: Mapping[str, Outcome], name: str) -> Outcome:
    assert outcome.sample in baseline, f"sample {outcome.sample} has no outcome under {name}"
    return baseline[outcome.sample]


def _lost(group: Sequence[Outcome], full: Sequence[Outcome]) -> list[float]:
    """What each prompt loses against full attention; resampled as differences, so that they stay paired."""
    return [truth.score - mine.score for mine, truth in zip(group, full, strict=True)]


def _scores(group: Sequence[Outcome]) -> list[float]:
    return [outcome.score for outcome in group]


def _mean(groups: Sequence[Sequence[Outcome]], value: Value) -> Estimate:
    return interval_over_tasks([[value(outcome) for outcome in group] for group in groups])


def _selection(groups: Sequence[Sequence[Outcome]]) -> Estimate | None:
    """Mean over tasks, of the outcomes for which something was selected; None if there are none."""
    selected = [[o.selection for o in group if o.selection is not None] for group in groups]
    shares = [values for values in selected if values]
    return interval_over_tasks(shares) if shares else None
