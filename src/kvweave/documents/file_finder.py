"""Finds the files under some paths, and gives the reason for each one that is left out. Opens no file."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvweave.documents.file_types import kind_without_text
from kvweave.errors import PathNotFound
from kvweave.results import SkippedFile

SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules", "venv", "env", "CVS", "__MACOSX"})
"""Folders that tools make. Hidden folders (.git, .hg, .svn, .venv, …) are skipped too."""

_VENV_MARKER: Final = "pyvenv.cfg"
_NEVER_OPENED: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Kinds of files that are not opened: reading one could wait for another process, or never end."""


def find_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[SkippedFile]]:
    """Find the files under some paths.

    A folder is walked in alphabetical order, without hidden entries, folders of tools and virtual environments. A hidden
    file or folder is only read if `paths` names it.

    Returns:
        The files to read, as absolute paths, each once however many links lead to it; and the skipped files with reasons.
        A name that is not UTF-8 is written so that it can be printed.

    Raises:
        PathNotFound: one of `paths` does not exist. It is raised before anything is read.
    """
    absolute = [Path(os.path.abspath(Path(path).expanduser())) for path in paths]
    for given, path in zip(paths, absolute, strict=True):
        if not path.exists():
            raise PathNotFound(
                f"{_printable(given)} does not exist (looked at {_printable(path)}); check the spelling"
            )
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    for found in _walk(absolute[::-1], skipped):
        if reason := _reason_to_skip(found):
            skipped.append(SkippedFile(Path(_printable(found)), reason))
        else:
            files.append(found)
    return files, skipped


def _walk(pending: list[Path], skipped: list[SkippedFile]) -> Iterator[Path]:
    """Yield the files at or under these paths, the last one first."""
    seen = set[str]()  # real paths, so that a loop of links ends
    while pending:
        path = pending.pop()
        real = os.path.realpath(path) if _is_utf8(path) else _printable(path)
        if real in seen:
            continue
        seen.add(real)
        if not os.path.isdir(path) or not _is_utf8(path):
            yield path
            continue
        try:
            names = sorted(os.listdir(path), reverse=True)
        except OSError as error:
            skipped.append(SkippedFile(path, f"cannot list the folder: {error.strerror}"))
            continue
        if _VENV_MARKER not in names:
            pending += [
                path / name for name in names if not name.startswith(".") and name not in SKIPPED_FOLDERS
            ]


def _reason_to_skip(path: Path) -> str | None:
    if not _is_utf8(path):
        return "its name is not UTF-8; rename it"  # no database, terminal or JSON accepts it
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return "a link to nothing"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if kind != stat.S_IFREG:
        return _NEVER_OPENED.get(kind, "not a regular file")
    return kind_without_text(path.name)


def _is_utf8(path: Path) -> bool:
    return str(path) == _printable(path)


def _printable(path: str | Path) -> str:
    """Return the path with each byte that is not UTF-8 escaped as Python writes it, such as `\\udce9`."""
    return str(path).encode("utf-8", "backslashreplace").decode()
