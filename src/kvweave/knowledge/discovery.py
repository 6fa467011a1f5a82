"""Which files a person means by a few paths.

Looks at names and kinds of directory entries only; what is inside a file is reading's business.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvweave.core import SkippedFile
from kvweave.errors import PathNotFound
from kvweave.knowledge.kinds import kind_without_text

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "env", "CVS", "__MACOSX"})
"""Beside every hidden folder (.git, .hg, .svn, .venv, …): tools' own files, not a person's."""

VENV_MARK = "pyvenv.cfg"


def find_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[SkippedFile]]:
    """List the files under some paths.

    A folder is walked in the order of its names, without hidden entries, tools' folders and virtual
    environments. A hidden file or folder that is itself named in `paths` is taken.

    Args:
        paths: files and folders, relative to the working folder or absolute.

    Returns:
        Files to read, absolute, each once however many ways lead to it; and what was left out with the reason
        (kinds that hold no text, unreadable folders, broken links, devices).

    Raises:
        PathNotFound: one of `paths` does not exist. Raised before anything is read.
    """
    named = [Path(os.path.abspath(Path(path).expanduser())) for path in paths]
    for given, path in zip(paths, named, strict=True):
        if not path.exists():
            raise PathNotFound(f"{given} does not exist (looked at {path}); check the spelling")
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    seen: set[str] = set()
    for path in named:
        for found in _walk(path, seen, skipped):
            reason = _reason_to_skip(found)
            if reason:
                skipped.append(SkippedFile(found, reason))
            else:
                files.append(found)
    return files, skipped


def _walk(path: Path, seen: set[str], skipped: list[SkippedFile]) -> Iterator[Path]:
    """Files at or under `path`; `seen` holds the real paths met so far, which also ends loops of links."""
    pending = [path]
    while pending:
        path = pending.pop()
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        if not path.is_dir():
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
    if not path.exists():
        return "a link to nothing"
    if not path.is_file():
        return "not a regular file"  # opening a pipe would wait for ever
    return kind_without_text(path.name)
