"""Rows for a terminal and for programs: a compact table, and plain values that JSON can hold."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvweave_lab.eval.report import slices
from kvweave_lab.eval.results import QUOTABLE, Estimate, Row
from kvweave_lab.eval.summary import OVERALL

_PLAIN: Final = ("task", "context_tokens", "recipe", "ratio", "coverage", "samples")


def table(rows: Sequence[Row]) -> Table:
    """Length by length, task by task, `overall` last; a name that stands in the line above is left out."""
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        caption="± half of the 95 % interval · rows: context tokens computed per prompt",
    )
    shown.caption_justify = "left"
    shown.add_column("task", overflow="fold")
    shown.add_column("recipe", overflow="fold")
    for name in ("budget", "samples", "score", "norm.", "agree", "kl", "rows", "sel."):
        shown.add_column(name, no_wrap=True, justify="right")
    for context_tokens in slices.lengths(rows):
        here = slices.at_length(rows, context_tokens)
        shown.add_row(f"{context_tokens:,} tokens" if context_tokens else "from a file", style="bold")
        for task in sorted(slices.panels(here), key=lambda name: name == OVERALL):
            _add_task(shown, slices.of_task(here, task))
    return shown


def _add_task(shown: Table, rows: Sequence[Row]) -> None:
    task = rows[0].task
    for recipe, points in slices.by_recipe(rows).items():
        name = recipe
        for row in points:
            shown.add_row(escape(task), escape(name), *_numbers(row))
            task = name = ""


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Plain values: an estimate is a number under its name and [low, high] under its name with `_interval`."""
    return [_plain(row) for row in rows]


def first_look(prompts: int) -> str | None:
    """What to say about figures of which one rests on so few prompts; None if they are enough."""
    if prompts >= QUOTABLE:
        return None
    counted = f"{prompts:,} prompt{'' if prompts == 1 else 's'}"
    return f"Some figures rest on {counted}; below {QUOTABLE} they are for a first look and not to be quoted."


def _numbers(row: Row) -> tuple[str, ...]:
    half = f"{slices.margin(row.score):.3f}".removeprefix("0")
    return (
        f"{row.budget:g}",
        f"{row.samples}",
        f"{row.score.value:.3f} ±{half}",
        "–" if row.normalised is None else f"{row.normalised.value:.2f}",
        f"{row.agreement.value:.2f}",
        f"{row.kl.value:.3f}",
        f"{row.rows.value:.0f}",
        "–" if row.selection is None else f"{row.selection.value:.2f}",
    )


def _plain(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {name: getattr(row, name) for name in _PLAIN}
    for field in fields(Row):
        if field.name not in _PLAIN:
            estimate: Estimate | None = getattr(row, field.name)
            plain[field.name] = None if estimate is None else estimate.value
            plain[f"{field.name}_interval"] = None if estimate is None else [estimate.low, estimate.high]
    return plain
