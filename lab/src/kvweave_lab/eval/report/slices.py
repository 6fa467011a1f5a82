"""Rows by length, task and recipe, in the order in which the evaluation gave them.

A recipe with coverages stands beside the same one with ratios, as a series of its own.
"""

from collections.abc import Sequence

from kvweave_lab.eval.results import Estimate, Row
from kvweave_lab.eval.summary import OVERALL


def lengths(rows: Sequence[Row]) -> list[int]:
    """The context lengths, shortest first; 0 stands for samples from a file."""
    return sorted({row.context_tokens for row in rows})


def at_length(rows: Sequence[Row], context_tokens: int) -> list[Row]:
    """The rows of one context length."""
    return [row for row in rows if row.context_tokens == context_tokens]


def tasks(rows: Sequence[Row]) -> list[str]:
    """The tasks, without `overall`."""
    return [task for task in dict.fromkeys(row.task for row in rows) if task != OVERALL]


def panels(rows: Sequence[Row]) -> list[str]:
    """The tasks, behind `overall` where that says more than the only task does."""
    named = tasks(rows)
    return [OVERALL, *named] if len(named) != 1 and of_task(rows, OVERALL) else named


def of_task(rows: Sequence[Row], task: str) -> list[Row]:
    """The rows of one task."""
    return [row for row in rows if row.task == task]


def overall(rows: Sequence[Row]) -> list[Row]:
    """The rows that speak for a length: the mean over tasks, or the only task's; empty if there is neither."""
    return of_task(rows, panels(rows)[0]) if len(tasks(rows)) <= 1 else of_task(rows, OVERALL)


def recipes(rows: Sequence[Row]) -> list[str]:
    """The recipes."""
    return list(dict.fromkeys(row.series for row in rows))


def by_recipe(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Each recipe's rows by rising budget."""
    return {
        recipe: sorted((row for row in rows if row.series == recipe), key=lambda row: row.budget)
        for recipe in recipes(rows)
    }


def swept(rows: Sequence[Row]) -> bool:
    """Whether a line through one recipe's rows means something.

    A recipe that can only be left as it is or recomputed whole has points at 0 and 1 and nothing between them.
    """
    return len(rows) > 1 and any(0 < row.budget < 1 for row in rows)


def length_named(context_tokens: int) -> str:
    """A context length for people."""
    return f"{context_tokens:,} tokens of context" if context_tokens else "samples from a file"


def margin(estimate: Estimate) -> float:
    """Half the width of the interval."""
    return (estimate.high - estimate.low) / 2
