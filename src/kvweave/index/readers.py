"""Finds the files under some paths, and reads each into a Document: its text, its title, the digest of its bytes.

`find_files` walks folders, `read_document` reads one file by its kind. Knows nothing about chunks.
"""

import codecs
import gzip
import hashlib
import io
import logging
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from kvweave.errors import InaccessibleDocument, MissingExtra, PathNotFound, UnreadableDocument
from kvweave.index.file_types import HTML, MARKDOWN, content_suffix, kind_without_text
from kvweave.index.html import read_html
from kvweave.results import SkippedFile
from kvweave.types import Document

MAX_TEXT_BYTES = 64 * 2**20
MAX_PDF_BYTES = 512 * 2**20
"""PDF files are mostly pictures and fonts, so they may be larger than text."""

SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules", "venv", "env", "CVS", "__MACOSX"})
"""Tools' folders. Hidden folders (.git, .hg, .svn, .venv, …) are skipped too."""

_VENV_MARKER: Final = "pyvenv.cfg"
_NEVER_OPENED: Final = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""Files that are not opened: reading one would wait for another process, or never end."""


# Finding files


def find_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[SkippedFile]]:
    """Find the files under some paths.

    A folder is walked in the order of its names, without hidden entries, tools' folders and virtual environments. A
    hidden file or folder is only read if `paths` names it.

    Args:
        paths: files and folders, relative to the working folder or absolute.

    Returns:
        Files to read, as absolute paths, each once however many links lead to it; and the skipped ones with the reason:
        kinds without text, unreadable folders, broken links, pipes, sockets, devices, and names that are not UTF-8
        (in a form that can be printed).

    Raises:
        PathNotFound: one of `paths` does not exist. Raised before anything is read.
    """
    absolute = [Path(os.path.abspath(Path(path).expanduser())) for path in paths]
    for given, path in zip(paths, absolute, strict=True):
        if not path.exists():
            raise PathNotFound(
                f"{_printable(given)} does not exist (looked at {_printable(path)}); check the spelling"
            )
    files: list[Path] = []
    skipped: list[SkippedFile] = []
    seen: set[str] = set()
    for path in absolute:
        for found in _walk(path, seen, skipped):
            reason = _reason_to_skip(found)
            if reason:
                skipped.append(SkippedFile(Path(_printable(found)), reason))
            else:
                files.append(found)
    return files, skipped


def _walk(path: Path, seen: set[str], skipped: list[SkippedFile]) -> Iterator[Path]:
    """Yield the files at or under `path`; `seen` collects real paths, which also ends loops of links."""
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
    """Return the path with bytes that are not UTF-8 written as `\\udce9`, which is how Python represents them."""
    return str(path).encode("utf-8", "backslashreplace").decode()


# Reading a file


def read_document(path: Path) -> Document:
    """Read one file: text of any kind, HTML, PDF, each also as `.gz`.

    Returns:
        The document; `source` is the absolute path, `digest` that of the very bytes the text came from.

    Raises:
        UnreadableDocument: binary, in an unknown encoding, damaged, encrypted, empty or too large.
        InaccessibleDocument: it could not be opened or read. Both messages are the reason alone, without the path.
        MissingExtra: a PDF, and pypdf is not installed.
    """
    path = path.absolute()
    compressed = path.suffix.lower() == ".gz"
    kind = content_suffix(path.name)
    limit = MAX_PDF_BYTES if kind == ".pdf" else MAX_TEXT_BYTES
    stored = _read_bytes(path, limit)
    digest = hashlib.sha256(stored).hexdigest()
    data = _decompressed(stored, limit) if compressed else stored
    if not data.strip():
        raise UnreadableDocument("the file is empty")
    text, title = _text_and_title(data, kind)
    text = _without_surrogates(text)
    if not text.strip():
        raise UnreadableDocument("there is no text in the file")
    title = _without_surrogates(title) or (path.stem if compressed else path.name)
    return Document(str(path), title, text, digest)


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes, as in its Document: 64 hex digits. The file is not loaded into memory.

    Raises InaccessibleDocument if it cannot be opened or read.
    """
    try:
        with _open(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InaccessibleDocument(_access_error(error)) from error


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    # Non-blocking: a pipe may have replaced the file since it was found, and opening it would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("not a regular file")
        yield stream


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        with _open(path) as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise InaccessibleDocument(_access_error(error)) from error
    if len(data) > limit:
        raise UnreadableDocument(_too_large(limit))
    return data


def _decompressed(data: bytes, limit: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            text = stream.read(limit + 1)  # no more: a small file may expand to gigabytes
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"damaged gzip file: {error}") from error
    if len(text) > limit:
        raise UnreadableDocument(f"unpacked, {_too_large(limit)}")
    return text


def _access_error(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, FileNotFoundError):
        return "it no longer exists"
    return f"cannot be read: {error.strerror or error}"


def _too_large(limit: int) -> str:
    return f"larger than {limit // 2**20} MiB; split it into smaller files"


# Text and title, by the kind of file

_UNDERLINED: Final = re.compile(r"^(?=\S)(.+)\n([=\-~^\"'`#*+])\2{2,}[ \t]*$", re.MULTILINE)
_ATX_HEADING: Final = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
_FENCED: Final = re.compile(r"^(```|~~~).*?(^\1|\Z)", re.MULTILINE | re.DOTALL)


def _text_and_title(data: bytes, kind: str) -> tuple[str, str]:
    if kind == ".pdf":
        return _read_pdf(data)
    text = _decode(data)
    if kind in HTML:
        return read_html(text)
    if kind in MARKDOWN:
        return text, _markdown_title(text)
    return text, _underlined_title(text) if kind in (".rst", ".txt", "") else ""


def _markdown_title(text: str) -> str:
    found = _ATX_HEADING.search(_FENCED.sub("", text))
    return found[1].strip() if found else _underlined_title(text)


def _underlined_title(text: str) -> str:
    found = _UNDERLINED.search(text)
    return found[1].strip() if found else ""


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates and NULs, which no tokenizer or database accepts, by U+FFFD."""
    return re.sub("[\ud800-\udfff\0]", "\ufffd", text)


# Plain text

_BYTE_ORDER_MARKS: Final = (  # UTF-32 first: its little-endian mark starts with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_CONTROL: Final = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\b\x1b\x1a")
_HIGH: Final = bytes(range(128, 256))
_MAX_CONTROL_SHARE: Final = 0.01
_MAX_HIGH_SHARE: Final = 0.3
"""Western text in a one-byte encoding is mostly ASCII; more high bytes mean another script's encoding."""


def _decode(data: bytes) -> str:
    """Decode UTF-8; UTF-16 or UTF-32 with a byte order mark; or Western one-byte text, if it looks like that.

    Returns:
        The text with line ends as "\\n", without a byte order mark.

    Raises:
        UnreadableDocument: NUL bytes, too many control characters, or no encoding that fits.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return _with_newlines(_decode_marked(data, encoding))
    if b"\0" in data:
        raise UnreadableDocument("binary file (it contains NUL bytes)")
    if _share(data, _CONTROL) > _MAX_CONTROL_SHARE:
        raise UnreadableDocument("binary file (it is full of control characters)")
    try:
        return _with_newlines(data.decode("utf-8"))
    except UnicodeDecodeError:
        return _with_newlines(_decode_western(data))


def _decode_marked(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"damaged text: it starts like {encoding}, but {error.reason}") from error


def _decode_western(data: bytes) -> str:
    if _share(data, _HIGH) > _MAX_HIGH_SHARE:
        raise UnreadableDocument("neither UTF-8 nor Western text; save it as UTF-8")
    try:
        return data.decode("cp1252")  # Latin-1 with the quotes and dashes that real files have
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _share(data: bytes, members: bytes) -> float:
    return 1 - len(data.translate(None, members)) / len(data) if data else 0.0


# PDF


def _read_pdf(data: bytes) -> tuple[str, str]:
    """Return the text, with a blank line between pages, and the title from the metadata (may be empty).

    Raises:
        MissingExtra: pypdf is not installed.
        UnreadableDocument: encrypted, damaged, or without a text layer.
    """
    pypdf = _import_pypdf()
    try:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument("PDF is encrypted; save a copy without a password")
        text = "\n\n".join(page.extract_text().strip() for page in reader.pages)
        title = str((reader.metadata and reader.metadata.title) or "")
    except UnreadableDocument:
        raise
    except pypdf.errors.DependencyError as error:
        raise UnreadableDocument("PDF is encrypted; save a copy without a password") from error
    except Exception as error:  # damage shows as any exception, from KeyError to RecursionError
        raise UnreadableDocument(f"damaged PDF ({type(error).__name__}: {error})") from error
    if not text.strip():
        raise UnreadableDocument("PDF without a text layer (scanned pages?); run it through OCR first")
    return text, title.strip()


def _import_pypdf() -> ModuleType:
    try:
        import pypdf  # optional, so not at the top
        import pypdf.errors
    except ImportError as error:
        raise MissingExtra("reading PDF needs pypdf: pip install 'kvweave[pdf]'") from error
    # Warnings about sloppy files are not for the user; real damage is raised. The level is set once, by the first thread,
    # and not at all if the application has chosen one.
    logger = logging.getLogger("pypdf")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    module: ModuleType = pypdf
    return module
