"""A selection report on disk: everything as JSON, and its figures."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvweave.engine.facts import facts
from kvweave.errors import InvalidRequest
from kvweave_lab.eval.selection.plots import PICTURES, pictures, sweep_picture
from kvweave_lab.eval.selection.report import SelectionReport

_REPORT = ("selection.json", *(f"{name}.png" for name in PICTURES))
_SWEEP = ("sweep.json", "sweep.png")


def write_selection(folder: Path, report: SelectionReport) -> list[Path]:
    """Write `selection.json` and a PNG for every figure; makes the folder and replaces what an earlier report left.

    Returns the files written. Raises InvalidRequest if the folder cannot be written to.
    """
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        figures = {f"{name}.png": image for name, image in pictures(report).items()}
        return _write(folder, {"selection.json": _json(facts(report)), **figures})


def write_sweep(folder: Path, reports: Mapping[str, SelectionReport]) -> list[Path]:
    """Write reports by setting: `sweep.json` with all of them and `sweep.png`; as `write_selection` otherwise."""
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        contents = {"sweep.json": _json(facts(dict(reports))), "sweep.png": sweep_picture(reports)}
        return _write(folder, contents)


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be written to ({error.strerror}); name another folder"
        ) from error


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    for old in {*_REPORT, *_SWEEP} - {*contents}:  # it would stand beside this report as if it belonged to it
        (folder / old).unlink(missing_ok=True)
    return [folder / name for name in contents]
