"""How commands print results: JSON, progress bars, amounts with units."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from kvweave.cli.terminal import harmless, prints_unicode

if TYPE_CHECKING:
    from kvweave.results import Source
    from kvweave.state.knowledge_base_state import Progress as Report

_PIPED_WIDTH = 200
"""Columns of tables that a pipe or a log reads; without a terminal there is no width to ask for."""


class _HarmlessConsole(Console):
    """Prints symbols in place of control characters in a text; its own colours and cursor movements remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as the base class does."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


STDOUT = _HarmlessConsole(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
STDERR = _HarmlessConsole(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    from kvweave.results import facts

    typer.echo(json.dumps(facts(value), ensure_ascii=not prints_unicode(), indent=2))


def say(line: str, style: str | None = None) -> None:
    """Print a line as it is to standard output: without markup, and wrapped by the terminal alone."""
    STDOUT.print(line, style=style, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(quiet: bool) -> Iterator["Report"]:
    """Show one progress bar per stage on standard error; yield the callback that advances it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=STDERR,
        transient=True,
        disable=quiet,
    )
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done, total=total)

    with bar:
        yield report


def amount(size_bytes: float) -> str:
    """Format bytes with a decimal unit: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def seconds(value_s: float) -> str:
    """Format a duration, in milliseconds below one second."""
    return f"{value_s * 1e3:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"


def share(value: float) -> str:
    """Format a share 0..1 as a percentage."""
    return f"{value:.0%}"


def place(source: "Source") -> str:
    """Return the place of a source for people: " page 3, Guide > Setup", " line 12", or an empty text."""
    page = f"page {source.page}" if source.page is not None else ""
    line = f"line {source.line}" if source.line is not None else ""
    where = ", ".join(filter(None, (page, line, source.heading)))
    return f" {where}" if where else ""
