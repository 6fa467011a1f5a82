"""Rows for a terminal and for programs: a compact table, and plain values that JSON can hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvweave.errors import InvalidRequest
from kvweave.evaluation.report import slices
from kvweave.evaluation.results import Estimate, Row
from kvweave.evaluation.summary import OVERALL

_ESTIMATES: Final = ("score", "full_score", "reuse_score", "normalised", "agreement", "kl", "faithfulness")
_INTERVAL: Final = "_interval"


def table(rows: Sequence[Row]) -> Table:
    """Length by length, task by task, `overall` last; a name that stands in the line above is left out."""
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        caption="± half of the 95 % interval",
    )
    shown.caption_justify = "left"
    shown.add_column("task", overflow="fold")
    shown.add_column("recipe", overflow="fold")
    for name in ("ratio", "samples", "score", "norm.", "agree", "kl", "rows", "sel."):
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


def from_json(values: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows that `to_json` was given; raises InvalidRequest for anything else."""
    try:
        return [_row(value) for value in values]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"these are no rows of an evaluation: {error!r}; run it again to make new ones"
        ) from error


def _numbers(row: Row) -> tuple[str, ...]:
    half = f"{slices.margin(row.score):.3f}".removeprefix("0")
    return (
        f"{row.ratio:g}",
        f"{row.samples}",
        f"{row.score.value:.3f} ±{half}",
        "–" if row.normalised is None else f"{row.normalised.value:.2f}",
        f"{row.agreement.value:.2f}",
        f"{row.kl.value:.3f}",
        f"{row.rows:.0f}",
        "–" if row.selection is None else f"{row.selection:.2f}",
    )


def _plain(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in fields(Row):
        value = getattr(row, field.name)
        if field.name in _ESTIMATES:
            plain[field.name] = None if value is None else value.value
            plain[field.name + _INTERVAL] = None if value is None else [value.low, value.high]
        else:
            plain[field.name] = value
    return plain


def _row(plain: Mapping[str, Any]) -> Row:
    known: dict[str, Any] = {}
    for field in fields(Row):
        value = plain[field.name]
        if field.name in _ESTIMATES and value is not None:
            low, high = plain[field.name + _INTERVAL]
            value = Estimate(value, low, high)
        known[field.name] = value
    return Row(**known)
