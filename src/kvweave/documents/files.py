"""Finds the files under some paths, without opening one, and tells a file's kind from its name or its first bytes."""

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from kvweave.errors import PathNotFound
from kvweave.results import SkippedFile

MARKDOWN: Final = frozenset({".md", ".markdown", ".mdown", ".mkd"})
MAILS: Final = frozenset({".eml", ".mbox"})

SPLIT_AS_MARKDOWN: Final = MARKDOWN | {".ipynb"}

_WITHOUT_TEXT: Final = {
    "an image": "png jpg jpeg gif bmp tif tiff webp ico icns psd heic avif xcf",
    "sound or video": "mp3 wav flac ogg oga m4a aac mp4 m4v mkv mov avi webm wmv",
    "an archive": "zip tar tgz tbz2 txz bz2 xz zst lz4 7z rar jar war whl egg deb rpm apk iso dmg cab",
    "a program or library": "exe dll so dylib a o obj lib class pyc pyo pyd wasm elf ko",
    "a font": "ttf otf woff woff2 eot",
    "a database or model": "sqlite sqlite3 mdb parquet arrow feather npy npz pt pth safetensors onnx gguf h5 pkl pickle",
    "an old office file; save it as .docx, .xlsx or .pptx": "doc ppt",
    "an office file, which is not supported yet": "odt odp rtf mobi djvu ps pages numbers",
    "an Outlook file; save its e-mails as .eml": "msg pst ost",
    "signed or encrypted data": "p7m p7s gpg pgp",
}
_KINDS: Final = {
    f".{suffix}": kind for kind, suffixes in _WITHOUT_TEXT.items() for suffix in suffixes.split()
}

_SIGNATURES: Final = {
    b"PK\x03\x04": "an archive (zip)",
    b"7z\xbc\xaf\x27\x1c": "an archive (7z)",
    b"Rar!\x1a\x07": "an archive (rar)",
    b"\x1f\x8b": "an archive (gzip)",
    b"BZh": "an archive (bzip2)",
    b"\xfd7zXZ\0": "an archive (xz)",
    b"\x28\xb5\x2f\xfd": "an archive (zstd)",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an old office file; save it as .docx, .xlsx or .pptx",
    b"%PDF-": "a PDF; give it the suffix .pdf",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"SQLite format 3\0": "a database",
}
_TAR_MARK_AT: Final = 257

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


def content_suffix(name: str) -> str:
    """Return the suffix of the uncompressed file in lower case: ".html" for "guide.HTML.gz", "" for "README"."""
    path = PurePath(name)
    if path.suffix.lower() == ".gz":
        path = PurePath(path.stem)
    return ".mbox" if path.name.lower() == "mbox" else path.suffix.lower()


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a file's name, with a number before its suffix if the name is taken."""
    stem, suffix = os.path.splitext(name)
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{stem} ({number}){suffix}"
    return free


def outer_file(source: str) -> str:
    """Return the outermost file that contains a source, such as the e-mail of an attachment; a plain file is its own."""
    outer = source
    for parent in Path(source).parents:
        if content_suffix(parent.name) in MAILS:
            outer = str(parent)
    return outer


def kind_without_text(name: str) -> str | None:
    """Return the kind of a file without readable text, such as "an image (.png)"; None for all other files."""
    suffix = content_suffix(name)
    return f"{_KINDS[suffix]} ({suffix})" if suffix in _KINDS else None


def binary_kind(data: bytes) -> str | None:
    """Return the kind of a binary file, such as "an archive (zip)", from its first bytes; None for all other files."""
    if data[_TAR_MARK_AT : _TAR_MARK_AT + 5] == b"ustar":
        return "an archive (tar)"
    return next((kind for mark, kind in _SIGNATURES.items() if data.startswith(mark)), None)


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
