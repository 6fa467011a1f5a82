"""A matrix of preparations and selectors for a terminal and for programs, and in a sentence."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvweave_lab.eval.matrix import COMPARED, Cell, Matrix, verdict
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.results import Estimate

_NONE: Final = "–"
Part = Callable[[Cell], Estimate | None]
PARTS: Final[tuple[tuple[str, Part], ...]] = (
    ("score", lambda cell: cell.score),
    ("normalised", lambda cell: cell.normalised),
    (f"gain over {COMPARED}", lambda cell: cell.gain),
)
"""What is said of a cell."""


def matrix_table(matrix: Matrix) -> Table:
    """Scores, normalised scores and gains, one below the other; rows are selectors, columns preparations."""
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        title=f"{slices.length_named(matrix.context_tokens)}, ratio {matrix.ratio:g}",
        title_justify="left",
        caption="\n".join(["± half of the 95 % interval", *sentences(matrix)]),
        caption_justify="left",
    )
    shown.add_column("", overflow="fold")
    for preparation in matrix.preparations:
        shown.add_column(escape(preparation), no_wrap=True, justify="right")
    for name, part in PARTS:
        shown.add_row(name, style="bold")
        for selector in matrix.selectors:
            cells = (matrix.cell(selector, preparation) for preparation in matrix.preparations)
            shown.add_row(
                escape(selector), *(_said(cell, part, signed=part is PARTS[-1][1]) for cell in cells)
            )
    return shown


def sentences(matrix: Matrix) -> list[str]:
    """What each preparation does to the selectors, beside isolated chunks."""
    said = []
    for preparation in matrix.preparations:
        found = verdict(matrix, preparation)
        if found is not None:
            said.append(
                f"{preparation} lifts {found.lifted} of {found.of} selectors and lowers {found.lowered};"
                " of the others the interval holds 0"
            )
    return said


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Plain values: an estimate is a number under its name and [low, high] under its name with `_interval`."""
    return {
        "context_tokens": matrix.context_tokens,
        "ratio": matrix.ratio,
        "selectors": list(matrix.selectors),
        "preparations": list(matrix.preparations),
        "cells": [_plain(cell) for cell in matrix.cells],
    }


def _said(cell: Cell | None, part: Part, *, signed: bool) -> str:
    estimate = None if cell is None else part(cell)
    if estimate is None:
        return _NONE
    value = f"{estimate.value:+.3f}" if signed else f"{estimate.value:.3f}"
    return f"{value} ±{slices.margin(estimate):.3f}".replace("±0.", "±.")


def _plain(cell: Cell) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in fields(Cell):
        value = getattr(cell, field.name)
        if isinstance(value, Estimate):
            plain |= {field.name: value.value, f"{field.name}_interval": [value.low, value.high]}
        else:
            plain[field.name] = value
            if field.name in ("normalised", "gain"):
                plain[f"{field.name}_interval"] = None
    return plain
