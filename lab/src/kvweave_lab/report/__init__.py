"""What every evaluation and benchmark reports with: files, terminal tables and estimates as text; `figures`, `page`.

Knows no evaluation: each one describes its own rows and hands them over.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.table import Table

from kvweave.errors import InvalidRequest
from kvweave.files import write_atomically
from kvweave_lab.statistics import Estimate


def write_files(
    folder: Path, contents: Mapping[str, bytes], replaces: Callable[[str], bool] = lambda name: False
) -> list[Path]:
    """Write a report's files in this order, each one whole or not at all, and return their paths.

    Creates the folder, and deletes other files in it whose names `replaces` accepts: those of an earlier report.
    Raises InvalidRequest if the folder cannot be written to.
    """
    try:
        for name, content in contents.items():
            write_atomically(folder / name, [content])
        for old in folder.iterdir():
            if replaces(old.name) and old.name not in contents:
                old.unlink()
    except OSError as error:
        raise InvalidRequest(
            f"the report cannot be written to {folder} ({error.strerror}); name another --output"
        ) from error
    return [folder / name for name in contents]


def json_bytes(content: object, *, allow_nan: bool = True) -> bytes:
    """Return JSON values as the text of a report's file; raise ValueError for a NaN that is not allowed."""
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=allow_nan).encode() + b"\n"


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


def interval_text(estimate: Estimate, form: str) -> str:
    """Return an estimate with its interval in this number format, such as 1.0% (0.5%–1.5%)."""
    return f"{estimate.value:{form}} ({estimate.low:{form}}–{estimate.high:{form}})"


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
