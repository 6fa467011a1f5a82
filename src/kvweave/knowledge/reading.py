"""One file to one Document: its kind by its name, its text, its title, and the digest of its bytes.

Knows nothing about folders (discovery does that) or chunks.
"""

import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.core import Document
from kvweave.errors import InaccessibleDocument, UnreadableDocument
from kvweave.knowledge.decoding import decode_text, without_surrogates
from kvweave.knowledge.discovery import find_files
from kvweave.knowledge.kinds import HTML, MARKDOWN, content_suffix
from kvweave.knowledge.pdf import read_pdf
from kvweave.knowledge.webpage import read_webpage

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
