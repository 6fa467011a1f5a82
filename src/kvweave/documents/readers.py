"""Reads a file by its kind: its text, title, places and doubts, and the files inside it. Knows nothing about chunks."""

import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvweave.documents.extracted import Attachment, Extracted, ReadContext
from kvweave.documents.file_types import (
    HTML,
    MAILS,
    MARKDOWN,
    NOTEBOOKS,
    OFFICE,
    SHEETS,
    binary_kind,
    content_suffix,
    kind_without_text,
)
from kvweave.documents.formats import epub, mail, office, pdf, text
from kvweave.errors import InaccessibleDocument, MissingExtra, UnreadableDocument
from kvweave.results import SkippedFile
from kvweave.types import Document

MAX_TEXT_BYTES = 64 * 2**20
MAX_PDF_BYTES = 512 * 2**20
"""PDF, office files and mailboxes are mostly pictures, fonts and attachments, so they may be larger than text."""

MAX_NESTING: Final = 4
"""An e-mail in an e-mail in …"""

MAX_ATTACHMENTS: Final = 10_000
_LONGEST_NAME_BYTES: Final = 200

Reader = Callable[[bytes, ReadContext], Extracted]

_READERS: Final[dict[str, Reader]] = {
    **dict.fromkeys(MARKDOWN, text.read_markdown),
    **dict.fromkeys(HTML, text.read_page),
    **dict.fromkeys(NOTEBOOKS, text.read_notebook),
    **dict.fromkeys(SHEETS, text.read_csv),
    **dict.fromkeys((".rst", ".txt", ""), text.read_prose),
    **dict.fromkeys((".docx", ".docm"), office.read_docx),
    **dict.fromkeys((".pptx", ".pptm"), office.read_pptx),
    **dict.fromkeys((".xlsx", ".xlsm"), office.read_xlsx),
    ".pdf": pdf.read_pdf,
    ".epub": epub.read_epub,
    ".eml": mail.read_mail,
    ".mbox": mail.read_mailbox,
}
_LARGE: Final = OFFICE | MAILS | {".pdf", ".epub"}

RISKY: Final = _LARGE | HTML | NOTEBOOKS
"""Kinds whose readers may take long, use much memory or crash: they get a process of their own (`reader_process`)."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file's document, those of the files inside it, and what of these was skipped; paths are sources."""

    documents: tuple[Document, ...]
    skipped: tuple[SkippedFile, ...] = field(default=())


def read_document(path: Path) -> Document:
    """Return the file's own document; raises as `read_file`."""
    return read_file(path).documents[0]


def read_file(path: Path, ctx: ReadContext | None = None) -> ReadFile:
    """Read one file, also as `.gz`, and the files inside it.

    Returns:
        The documents, the file's own first. `source` is the absolute path, `digest` that of the very bytes the text came
        from. An attachment's source is a path below the file's.

    Raises:
        UnreadableDocument: binary, in an unknown encoding, damaged, password-protected, empty or too large.
        InaccessibleDocument: it could not be opened or read. Both messages are the reason alone, without the path.
        MissingExtra: the library for its kind is not installed.
    """
    path = path.absolute()
    kind = content_suffix(path.name)
    stored = _read_bytes(path, MAX_PDF_BYTES if kind in _LARGE else MAX_TEXT_BYTES)
    run = _FileRun(ctx or ReadContext())
    run.read(str(path), stored)
    return ReadFile(tuple(run.documents), tuple(run.skipped))


@dataclass(slots=True)
class _FileRun:
    """The reading of one file and those inside it."""

    ctx: ReadContext
    documents: list[Document] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def read(self, source: str, stored: bytes, depth: int = 0) -> None:
        """Read a file's bytes; raises as `read_file`."""
        path = Path(source)
        compressed = path.suffix.lower() == ".gz"
        kind = content_suffix(path.name)
        limit = MAX_PDF_BYTES if kind in _LARGE else MAX_TEXT_BYTES
        data = _decompressed(stored, limit) if compressed else stored
        if not data.strip():
            raise UnreadableDocument("the file is empty")
        found = _extracted(data, kind, self.ctx)
        words = _without_surrogates(found.text)
        if not words.strip():
            raise UnreadableDocument("there is no text in the file")
        title = _without_surrogates(found.title) or (path.stem if compressed else path.name)
        digest = hashlib.sha256(stored).hexdigest()
        self.documents.append(
            Document(source, title, words, digest, found.sections, found.notes, found.numbered_lines)
        )
        for attachment in found.attachments[:MAX_ATTACHMENTS]:
            self._read_attachment(source, attachment, depth + 1)

    def _read_attachment(self, outer: str, attachment: Attachment, depth: int) -> None:
        source = self._free(f"{outer}/{_usable(attachment.name)}")
        reason = kind_without_text(source)
        try:
            if reason is None and depth > MAX_NESTING:
                reason = "too many e-mails inside each other"
            if reason is None:
                self.read(source, attachment.data, depth)
        except (UnreadableDocument, MissingExtra) as error:
            reason = str(error)
        if reason is not None:
            self.skipped.append(SkippedFile(Path(source), reason))

    def _free(self, source: str) -> str:
        """Return the source, with a number if another file inside the same file has it."""
        free, number = source, 1
        while free in self.taken:
            number += 1
            stem, suffix = os.path.splitext(source)
            free = f"{stem} ({number}){suffix}"
        self.taken.add(free)
        return free


def _extracted(data: bytes, kind: str, ctx: ReadContext) -> Extracted:
    reader = _READERS.get(kind, text.read_plain)
    if kind not in _LARGE and (found := binary_kind(data)):
        raise UnreadableDocument(found)
    return reader(data, ctx)


def _usable(name: str) -> str:
    """Return an attachment's name as one part of a path."""
    name = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff/\\]+", "_", name).strip(" .") or "attachment"
    stem, suffix = os.path.splitext(name)
    room = _LONGEST_NAME_BYTES - len(suffix.encode())
    return stem.encode()[: max(room, 1)].decode("utf-8", "ignore") + suffix[:_LONGEST_NAME_BYTES]


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
            unpacked = stream.read(limit + 1)  # no more: a small file may expand to gigabytes
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"damaged gzip file: {error}") from error
    if len(unpacked) > limit:
        raise UnreadableDocument(f"unpacked, {_too_large(limit)}")
    return unpacked


def _access_error(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, FileNotFoundError):
        return "it no longer exists"
    return f"cannot be read: {error.strerror or error}"


def _too_large(limit: int) -> str:
    return f"larger than {limit // 2**20} MiB; split it into smaller files"


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates and NULs, which no tokenizer or database accepts, by U+FFFD; offsets stay."""
    return re.sub("[\ud800-\udfff\0]", "\ufffd", text)
