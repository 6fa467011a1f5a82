"""Rows of a report as a terminal table and as JSON, and estimates as text."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from rich.table import Table

from kvweave_lab.statistics import Estimate

QUOTABLE_PROMPTS = 200
"""An estimate over fewer prompts should not be quoted."""


def few_prompts_warning(prompts: int) -> str | None:
    """Return the warning for figures of which one rests on this number of prompts; None if they are enough."""
    if prompts >= QUOTABLE_PROMPTS:
        return None
    counted = f"{prompts:,} prompt{'' if prompts == 1 else 's'}"
    return f"Some figures rest on {counted}; below {QUOTABLE_PROMPTS} they are for a first look and not to be quoted."


def text_table(
    columns: Iterable[str], *, names: int = 1, title: str | None = None, caption: str | None = None
) -> Table:
    """Return an empty table for a terminal.

    The first `names` columns hold names: they are aligned left and wrap. The others hold numbers: they are aligned
    right and never wrap. Cells are rich markup; escape names that may contain brackets.
    """
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for number, column in enumerate(columns):
        if number < names:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, no_wrap=True, justify="right")
    return table


def half_width(estimate: Estimate) -> float:
    """Return half the width of the interval."""
    return (estimate.high - estimate.low) / 2


def margin_text(estimate: Estimate, digits: int = 3) -> str:
    """Return half the width of the interval as text, such as ±.013."""
    return "±" + f"{half_width(estimate):.{digits}f}".removeprefix("0")


def flatten(row: Any) -> dict[str, Any]:
    """Return a dataclass as JSON values.

    An estimate becomes a number under its name and [low, high] under its name with `_interval`; both are None for an
    estimate that is None.
    """
    hints = get_type_hints(type(row))
    flat: dict[str, Any] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if Estimate in (hints[field.name], *get_args(hints[field.name])):
            flat[field.name] = None if value is None else value.value
            flat[f"{field.name}_interval"] = None if value is None else [value.low, value.high]
        else:
            flat[field.name] = value
    return flat
