"""The report of `kvweave eval`: terminal tables, rows.json, figures as PNG, and one page that holds everything.

Knows rows, not how they were computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.comparisons import COMPARED, Cell, Matrix, StorageCost, verdict
from kvweave_lab.eval.rows import (
    OVERALL,
    Row,
    context_lengths,
    length_text,
    panel_names,
    rows_at_length,
    rows_by_series,
    rows_of_task,
)
from kvweave_lab.report import flatten, half_width, json_bytes, margin_text, text_table, write_files
from kvweave_lab.statistics import Estimate


@dataclass(frozen=True, slots=True)
class About:
    """What a reader must know to judge an evaluation's figures and to repeat it.

    Attributes:
        model: as the user named it.
        dtype: of the weights and of the KV.
        device: where the model ran.
        split: pool of the generated samples, or the file from which samples were read.
        seeds: of the generated samples; empty for samples from a file.
        samples: generated prompts per task, length and seed; or prompts per file, None for all.
        left_out: prompts that did not run because they are too long for the model.
        chunk_tokens: the largest chunk.
        context_tokens: lengths of the generated samples; empty for samples from a file.
        command: repeats the run when pasted into a shell.
        date: day of the run, ISO 8601.
        version: of kvweave.
        minutes: time that all outcomes took, those of interrupted runs included; the minutes of several processes are
            added up.
        critical_layers: the layers with which `qcfuse` scores tokens: those that `kvweave profile-layers` found, else the
            middle ones.
    """

    model: str
    dtype: str
    device: str
    split: str
    seeds: tuple[int, ...]
    samples: int | None
    left_out: int
    chunk_tokens: int
    context_tokens: tuple[int, ...]
    command: str
    date: str
    version: str
    minutes: float
    critical_layers: tuple[int, ...] = ()


def content(
    rows: Sequence[Row],
    about: About,
    matrices: Sequence[Matrix] = (),
    storages: Sequence[StorageCost] = (),
) -> dict[str, Any]:
    """Return everything as JSON values: the content of rows.json."""
    return {
        "about": asdict(about),
        "rows": rows_json(rows),
        "matrices": [matrix_json(matrix) for matrix in matrices],
        "storages": storages_json(storages),
    }


def write_report(
    folder: Path,
    rows: Sequence[Row],
    about: About,
    matrices: Sequence[Matrix] = (),
    storages: Sequence[StorageCost] = (),
) -> list[Path]:
    """Write rows.json, the figures and report.html, replacing the files of an earlier report one by one.

    Each file is written whole or not at all, and nothing is written before everything is drawn. Figures that only an
    earlier report has are deleted.

    Args:
        folder: created if it does not exist.
        rows: in the order in which tables list them.
        about: what was run.
        matrices: of the selectors that ran on several preparations.
        storages: of the recipes that ran with several storages.

    Returns:
        The files, the page last.

    Raises:
        InvalidRequest: there are no rows, or the folder cannot be written to.
    """
    from kvweave_lab.eval.report.figures import is_picture, pictures
    from kvweave_lab.eval.report.page import report_page

    if not rows:
        raise InvalidRequest("there is nothing to report: the evaluation has no rows")
    drawn = list(pictures(rows, matrices))
    files = {"rows.json": json_bytes(content(rows, about, matrices, storages))}
    files |= {f"{picture.name}.png": picture.light for picture in drawn}
    files["report.html"] = report_page(rows, about, drawn, matrices, storages).encode()
    return write_files(
        folder, files, lambda name: name.endswith(".png") and is_picture(name.removesuffix(".png"))
    )


# The parts as terminal tables and as JSON

_NONE: Final = "–"


def rows_table(rows: Sequence[Row]) -> Table:
    """Return the rows by length and task, `overall` last; a name is left out if the line above has it."""
    columns = ("task", "recipe", "budget", "samples", "score", "norm.", "agree", "kl", "rows", "sel.")
    caption = "± half of the 95 % interval · rows: context tokens computed per prompt"
    table = text_table(columns, names=2, caption=caption)
    for context_tokens in context_lengths(rows):
        at_length = rows_at_length(rows, context_tokens)
        table.add_row(f"{context_tokens:,} tokens" if context_tokens else "from a file", style="bold")
        for task in sorted(panel_names(at_length), key=lambda name: name == OVERALL):
            _add_task(table, rows_of_task(at_length, task))
    return table


def _add_task(table: Table, rows: Sequence[Row]) -> None:
    task = rows[0].task
    for series, points in rows_by_series(rows).items():
        name = series
        for row in points:
            table.add_row(escape(task), escape(name), *_numbers(row))
            task = name = ""


def _numbers(row: Row) -> tuple[str, ...]:
    return (
        f"{row.budget:g}",
        f"{row.samples}",
        f"{row.score.value:.3f} {margin_text(row.score)}",
        _NONE if row.normalised is None else f"{row.normalised.value:.2f}",
        f"{row.agreement.value:.2f}",
        f"{row.kl.value:.3f}",
        f"{row.rows.value:.0f}",
        _NONE if row.selection is None else f"{row.selection.value:.2f}",
    )


def rows_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as JSON values; an interval has its estimate's name with `_interval`."""
    return [flatten(row) for row in rows]


CELL_PARTS: Final[tuple[tuple[str, Callable[[Cell], Estimate | None]], ...]] = (
    ("score", lambda cell: cell.score),
    ("normalised", lambda cell: cell.normalised),
    (f"gain over {COMPARED}", lambda cell: cell.gain),
)
"""The parts of a matrix table, and what they show of a cell."""


def matrix_table(matrix: Matrix) -> Table:
    """Return scores, normalised scores and gains, one below the other; rows are selectors, columns preparations."""
    table = text_table(
        ("", *map(escape, matrix.preparations)),
        title=f"{length_text(matrix.context_tokens)}, ratio {matrix.ratio:g}",
        caption="\n".join(["± half of the 95 % interval", *verdict_sentences(matrix)]),
    )
    for name, part in CELL_PARTS:
        table.add_row(name, style="bold")
        for selector in matrix.selectors:
            cells = (matrix.cell(selector, preparation) for preparation in matrix.preparations)
            estimates = (None if cell is None else part(cell) for cell in cells)
            signed = part is CELL_PARTS[-1][1]
            table.add_row(escape(selector), *(_cell_text(estimate, signed=signed) for estimate in estimates))
    return table


def _cell_text(estimate: Estimate | None, *, signed: bool) -> str:
    if estimate is None:
        return _NONE
    value = f"{estimate.value:+.3f}" if signed else f"{estimate.value:.3f}"
    return f"{value} {margin_text(estimate)}"


def verdict_sentences(matrix: Matrix) -> list[str]:
    """Return the gains of each preparation over isolated chunks for the selectors."""
    sentences = []
    for preparation in matrix.preparations:
        found = verdict(matrix, preparation)
        if found is not None:
            sentences.append(
                f"{preparation} lifts {found.lifted} of {found.of} selectors and lowers {found.lowered};"
                " of the others the interval holds 0"
            )
    return sentences


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Return a matrix as JSON values; an interval has its estimate's name with `_interval`."""
    return {
        "context_tokens": matrix.context_tokens,
        "ratio": matrix.ratio,
        "selectors": list(matrix.selectors),
        "preparations": list(matrix.preparations),
        "cells": [flatten(cell) for cell in matrix.cells],
    }


def storage_table(costs: Sequence[StorageCost]) -> Table:
    """Return a line for each length, recipe, budget and storage."""
    table = text_table(
        ("recipe", "tokens", "budget", "storage", "samples", "exact", "score", "lost", "same"),
        title="chunk KV in fewer bits",
        caption="± half of the 95 % interval · lost: by this storage, on the same prompts · same: equal answers",
    )
    for cost in costs:
        budget = cost.ratio if cost.coverage is None else cost.coverage
        table.add_row(
            escape(cost.recipe),
            f"{cost.context_tokens:,}" if cost.context_tokens else "file",
            f"{budget:g}" + ("" if cost.coverage is None else " cov."),
            cost.storage,
            f"{cost.samples:,}",
            f"{cost.exact_score.value:.3f}",
            f"{cost.score.value:.3f}",
            f"{cost.lost.value:+.4f} ±{half_width(cost.lost):.4f}",
            f"{cost.same.value:.3f}",
        )
    return table


def storages_json(costs: Sequence[StorageCost]) -> list[dict[str, Any]]:
    """Return storage costs as JSON values; an interval has its estimate's name with `_interval`."""
    return [flatten(cost) for cost in costs]
