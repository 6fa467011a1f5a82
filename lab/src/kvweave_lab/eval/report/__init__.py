"""What an evaluation leaves behind: rows.json, figures as PNG, and one page that holds everything.

`table` shows the same rows in a terminal. Knows rows, not how they came about.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.matrix import Matrix
from kvweave_lab.eval.quantisation import StorageCost
from kvweave_lab.eval.report.about import About
from kvweave_lab.eval.report.matrix_table import matrix_json, matrix_table
from kvweave_lab.eval.report.storage_table import storage_table, storages_json
from kvweave_lab.eval.report.table import first_look, table, to_json
from kvweave_lab.eval.results import Row

__all__ = [
    "About",
    "content",
    "first_look",
    "matrix_json",
    "matrix_table",
    "storage_table",
    "table",
    "to_json",
    "write_report",
]


def content(
    rows: Sequence[Row],
    about: About,
    matrices: Sequence[Matrix] = (),
    storages: Sequence[StorageCost] = (),
) -> dict[str, Any]:
    """Everything in plain values: what rows.json holds."""
    return {
        "about": asdict(about),
        "rows": to_json(rows),
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
    """Write rows.json, the figures and report.html; files of an earlier report are replaced one by one.

    Each file is old or new, never half of it, and nothing is written before everything is drawn. Figures of an
    earlier report that this one does not have are deleted.

    Args:
        folder: made if it is not there.
        rows: in the order in which tables list them.
        about: what was run.
        matrices: of the selectors that ran on several preparations.
        storages: of the recipes that ran with several of those.

    Returns:
        The files, the page last.

    Raises:
        InvalidRequest: there are no rows, or the folder cannot be written to.
    """
    from kvweave_lab.eval.report.page import page
    from kvweave_lab.eval.report.plots import is_picture, pictures

    if not rows:
        raise InvalidRequest("there is nothing to report: the evaluation has no rows")
    drawn = list(pictures(rows, matrices))
    plain = content(rows, about, matrices, storages)
    files = {"rows.json": json.dumps(plain, ensure_ascii=False, indent=1).encode()}
    files |= {f"{picture.name}.png": picture.light for picture in drawn}
    files["report.html"] = page(rows, about, drawn, matrices, storages).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_replace(folder / name, data) for name, data in files.items()]
        for old in folder.glob("*.png"):
            if is_picture(old.stem) and old not in written:
                old.unlink()
    except OSError as error:
        raise InvalidRequest(
            f"the report cannot be written to {folder} ({error.strerror}); name another --output"
        ) from error
    return written


def _replace(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
