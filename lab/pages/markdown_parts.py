"""Markdown of the generated pages: tables, values with their ranges, and commands that are folded away."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

Result = Mapping[str, Any]
"""A file of lab/results, or a part of one."""

NOT_MEASURED = "Not measured yet."


P = ParamSpec("P")


def if_measured(part: Callable[Concatenate[Result, P], str]) -> Callable[Concatenate[Result | None, P], str]:
    """Make a part of a page say that it was not measured if its result is None."""

    @wraps(part)
    def shown(result: Result | None, *args: P.args, **named: P.kwargs) -> str:
        return NOT_MEASURED if result is None else part(result, *args, **named)

    return shown


def header(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def row(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [*header(*names), *(row(*cells) for cells in rows)]


def spread(values: Mapping[str, float]) -> str:
    """Return a median with the smallest and the largest value."""
    return f"{values['median']:.2f} ({values['low']:.2f} – {values['high']:.2f})"


def between(value: float, low: float, high: float, digits: int = 3) -> str:
    """Return a value and its interval."""
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def times(value: float, low: float, high: float) -> str:
    """Return a speed-up with the smallest and the largest one."""
    return f"{value:.2f}× ({low:.2f}–{high:.2f})"


def folded(commands: Sequence[str], note: str) -> list[str]:
    """Return commands that a reader has to unfold; visible are their number and the note."""
    return [
        f"<details><summary>{len(commands)} command{'' if len(commands) == 1 else 's'}, {note}</summary>",
        "",
        "```",
        *commands,
        "```",
        "",
        "</details>",
    ]
