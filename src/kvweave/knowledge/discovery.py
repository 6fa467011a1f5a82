"""Which files a person means by a few paths.

Looks at names and kinds of directory entries only; what is inside a file is reading's business.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvweave.core import SkippedFile
from kvweave.errors import PathNotFound
from kvweave.knowledge.kinds import kind_without_text

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "env", "CVS", "__MACOSX"})
"""Beside every hidden folder (.git, .hg, .svn, .venv, …): tools' own files, not a person's."""

VENV_MARK = "pyvenv.cfg"

_BLOCKING = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What is never opened: reading it waits for somebody else, or never ends."""


def find_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[SkippedFile]]:
    """List the files under some paths.

    A folder is walked in the order of its names, without hidden entries, tools' folders and virtual
    environments. A hidden file or folder that is itself named in `paths` is taken.

    Args:
        paths: files and folders, relative to the working folder or absolute.

    Returns:
        Files to read, absolute, each once however many ways lead to it; and what was left out with the reason
        (kinds that hold no text, unreadable folders, broken links, pipes, sockets and devices, names that are
        not UTF-8; the latter in a form that can be printed).

    Raises:
        PathNotFound: one of `paths` does not exist. Raised before anything is read.
    """
    named = [Path(os.path.abspath(Path(path).expanduser())) for path in paths]
    for given, path in zip(paths, named, strict=True):
        if not path.exists():
            raise PathNotFound(
                f"{_printable(given)} does not exist (looked at {_printable(path)}); check the spelling"
            )
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    seen: set[str] = set()
    for path in named:
        for found in _walk(path, seen, skipped):
            reason = _reason_to_skip(found)
            if reason:
                skipped.append(SkippedFile(Path(_printable(found)), reason))
            else:
                files.append(found)
    return files, skipped


def _walk(path: Path, seen: set[str], skipped: list[SkippedFile]) -> Iterator[Path]:
    """Files at or under `path`; `seen` holds the real paths met so far, which also ends loops of links."""
    pending = [path]
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
        if VENV_MARK not in names:
            pending += [
                path / name for name in names if not name.startswith(".") and name not in SKIPPED_FOLDERS
            ]


def _reason_to_skip(path: Path) -> str | None:
    if not _is_utf8(path):
        return "its name is not UTF-8; rename it"  # no database, no terminal and no JSON takes it
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return "a link to nothing"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if kind != stat.S_IFREG:
        return _BLOCKING.get(kind, "not a regular file")
    return kind_without_text(path.name)


def _is_utf8(path: Path) -> bool:
    return str(path) == _printable(path)


def _printable(path: str | Path) -> str:
    """The path with bytes that are not UTF-8 written as `\\udce9`, which is how Python holds them."""
    return str(path).encode("utf-8", "backslashreplace").decode()
