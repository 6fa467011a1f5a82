"""One file to one Document: its kind by its name, its text, its title, and the digest of its bytes.

Knows nothing about folders (discovery does that) or chunks.
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

from kvweave.errors import InaccessibleDocument, MissingExtra, PathNotFound, UnreadableDocument
from kvweave.index.file_types import HTML, MARKDOWN, content_suffix, kind_without_text
from kvweave.index.html import read_webpage
from kvweave.types import Document, SkippedFile

_MARKED = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_CONTROL = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\b\x1b\x1a")
_HIGH = bytes(range(128, 256))
MAX_CONTROL_SHARE = 0.01
MAX_HIGH_SHARE = 0.3
"""Western text in a one-byte encoding is mostly ASCII; more high bytes mean another script's encoding."""


def decode_text(data: bytes) -> str:
    """Decode as UTF-8, as UTF-16 or UTF-32 by their mark, or as Western one-byte text if it looks like it.

    Returns:
        The text with line ends as "\\n", without a byte order mark.

    Raises:
        UnreadableDocument: NUL bytes, too many control characters, or no encoding that fits.
    """
    for mark, encoding in _MARKED:
        if data.startswith(mark):
            return _unified(_decoded(data, encoding))
    if b"\0" in data:
        raise UnreadableDocument("binary file (it contains NUL bytes)")
    if _share(data, _CONTROL) > MAX_CONTROL_SHARE:
        raise UnreadableDocument("binary file (it is full of control characters)")
    try:
        return _unified(data.decode("utf-8"))
    except UnicodeDecodeError:
        return _unified(_western(data))


def without_surrogates(text: str) -> str:
    """`text` with lone surrogates and NULs, which no tokenizer or database takes, as U+FFFD."""
    return re.sub("[\ud800-\udfff\0]", "\ufffd", text)


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"damaged text: it starts like {encoding}, but {error.reason}") from error


def _western(data: bytes) -> str:
    if _share(data, _HIGH) > MAX_HIGH_SHARE:
        raise UnreadableDocument("neither UTF-8 nor Western text; save it as UTF-8")
    try:
        return data.decode("cp1252")  # Latin-1 with the quotes and dashes that real files have
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _share(data: bytes, members: bytes) -> float:
    return 1 - len(data.translate(None, members)) / len(data) if data else 0.0


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


def read_pdf(data: bytes) -> tuple[str, str]:
    """Extract the text, pages set apart by a blank line, and the title from the metadata (may be empty).

    Raises:
        MissingExtra: pypdf is not installed.
        UnreadableDocument: encrypted, damaged, or without a text layer.
    """
    pypdf = _pypdf()
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


def _pypdf() -> ModuleType:
    try:
        import pypdf  # optional, so not at the top
        import pypdf.errors
    except ImportError as error:
        raise MissingExtra("reading PDF needs pypdf: pip install 'kvweave[pdf]'") from error
    # Its remarks on sloppy files are not the user's business; what matters arrives as an exception. Set once
    # and for good, whichever thread comes first, and not where the application has chosen a level itself.
    remarks = logging.getLogger("pypdf")
    if remarks.level == logging.NOTSET:
        remarks.setLevel(logging.CRITICAL)
    module: ModuleType = pypdf
    return module


__all__ = ["MAX_PDF_BYTES", "MAX_TEXT_BYTES", "digest_file", "find_files", "read_document"]

MAX_TEXT_BYTES = 64 * 2**20
MAX_PDF_BYTES = 512 * 2**20
"""PDF files are mostly pictures and fonts, so they may be larger than text."""

_UNDERLINED = re.compile(r"^(?=\S)(.+)\n([=\-~^\"'`#*+])\2{2,}[ \t]*$", re.MULTILINE)
_ATX_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?(^\1|\Z)", re.MULTILINE | re.DOTALL)


def digest_file(path: Path) -> str:
    """Hash a file's bytes without holding them: the digest of its Document, as 64 hex digits.

    Raises InaccessibleDocument when it cannot be opened or read.
    """
    try:
        with _opened(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InaccessibleDocument(_refusal(error)) from error


def read_document(path: Path) -> Document:
    """Read one file: text of any kind, HTML, PDF, each also as `.gz`.

    Returns:
        The document; `source` is the absolute path, `digest` that of the very bytes the text came from.

    Raises:
        UnreadableDocument: binary, in an unknown encoding, damaged, encrypted, empty or too large.
        InaccessibleDocument: it could not be opened or read. Both texts are the reason alone, without the path.
        MissingExtra: a PDF, and pypdf is not installed.
    """
    path = path.absolute()
    packed = path.suffix.lower() == ".gz"
    kind = content_suffix(path.name)
    limit = MAX_PDF_BYTES if kind == ".pdf" else MAX_TEXT_BYTES
    stored = _read_bytes(path, limit)
    digest = hashlib.sha256(stored).hexdigest()
    data = _unpacked(stored, limit) if packed else stored
    if not data.strip():
        raise UnreadableDocument("the file is empty")
    text, title = _text_and_title(data, kind)
    text = without_surrogates(text)
    if not text.strip():
        raise UnreadableDocument("there is no text in the file")
    return Document(
        str(path), without_surrogates(title) or (path.stem if packed else path.name), text, digest
    )


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    # Without waiting for a writer: a pipe may have come in the file's place since it was found.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("not a regular file")
        yield stream


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        with _opened(path) as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise InaccessibleDocument(_refusal(error)) from error
    if len(data) > limit:
        raise UnreadableDocument(_too_large(limit))
    return data


def _unpacked(data: bytes, limit: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            text = stream.read(limit + 1)  # no more: a small file may hold gigabytes
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"damaged gzip file: {error}") from error
    if len(text) > limit:
        raise UnreadableDocument(f"unpacked, {_too_large(limit)}")
    return text


def _text_and_title(data: bytes, kind: str) -> tuple[str, str]:
    if kind == ".pdf":
        return read_pdf(data)
    text = decode_text(data)
    if kind in HTML:
        return read_webpage(text)
    if kind in MARKDOWN:
        return text, _markdown_title(text)
    return text, _underlined_title(text) if kind in (".rst", ".txt", "") else ""


def _markdown_title(text: str) -> str:
    found = _ATX_HEADING.search(_FENCED.sub("", text))
    return found[1].strip() if found else _underlined_title(text)


def _underlined_title(text: str) -> str:
    found = _UNDERLINED.search(text)
    return found[1].strip() if found else ""


def _refusal(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, FileNotFoundError):
        return "it no longer exists"
    return f"cannot be read: {error.strerror or error}"


def _too_large(limit: int) -> str:
    return f"larger than {limit // 2**20} MiB; split it into smaller files"
