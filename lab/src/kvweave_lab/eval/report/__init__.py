"""The report of `kvweave eval`: rows.json, figures as PNG, and one page that holds everything.

Knows rows, not how they were computed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.comparisons import Matrix, StorageCost
from kvweave_lab.eval.report.tables import matrix_json, rows_json, storages_json
from kvweave_lab.eval.rows import Row
from kvweave_lab.report import write_files


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
    plain = content(rows, about, matrices, storages)
    files = {"rows.json": json.dumps(plain, ensure_ascii=False, indent=1).encode()}
    files |= {f"{picture.name}.png": picture.light for picture in drawn}
    files["report.html"] = report_page(rows, about, drawn, matrices, storages).encode()
    written = write_files(folder, files)
    for old in folder.glob("*.png"):
        if is_picture(old.stem) and old not in written:
            old.unlink()
    return written
