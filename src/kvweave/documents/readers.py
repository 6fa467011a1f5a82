"""Reads files of all kinds, and the files inside them, as documents."""

import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvweave.documents.extracted import Attachment, Extracted, ReadContext, clean, without
from kvweave.documents.files import MARKDOWN, binary_kind, content_suffix, free_name, kind_without_text
from kvweave.documents.formats import mail, office, pdf, text
from kvweave.errors import InaccessibleDocument, MissingExtra, UnreadableDocument
from kvweave.results import SkippedFile
from kvweave.types import Document

MAX_TEXT_BYTES = 64 * 2**20
MAX_PDF_BYTES = 512 * 2**20
"""The limit for PDF, office files and mailboxes: they are mostly pictures, fonts and attachments."""

MAX_NESTING: Final = 4
"""How deep e-mails may be attached to e-mails."""

MAX_ATTACHMENTS: Final = 10_000
_LONGEST_NAME_BYTES: Final = 200

_INVISIBLE: Final = re.compile("[\u00ad\u200b\u2060\ufeff]+")
"""Not U+200C and U+200D, which change letters in Persian and in Indian scripts, and join emoji."""

_INVISIBLE_OR_HYPHENATED: Final = re.compile("\u00ad[ \t]*\n[ \t]*|" + _INVISIBLE.pattern)

Reader = Callable[[bytes, ReadContext], Extracted]

_SMALL: Final[dict[str, Reader]] = {
    **dict.fromkeys(MARKDOWN, text.read_markdown),
    **dict.fromkeys((".csv", ".tsv"), text.read_csv),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".geojson", ".jsonld"), text.read_json),
    **dict.fromkeys((".rst", ".txt", ""), text.read_prose),
}
_RISKY_SMALL: Final[dict[str, Reader]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), text.read_page),
    ".ipynb": text.read_notebook,
}
_LARGE: Final[dict[str, Reader]] = {
    **dict.fromkeys((".docx", ".docm"), office.read_docx),
    **dict.fromkeys((".pptx", ".pptm"), office.read_pptx),
    **dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls", ".ods"), office.read_workbook),
    ".pdf": pdf.read_pdf,
    ".epub": office.read_epub,
    ".eml": mail.read_mail,
    ".mbox": mail.read_mailbox,
}
RISKY: Final = _RISKY_SMALL | _LARGE
"""Kinds whose readers may take long, use much memory or crash: these run in another process (`reader_process`)."""

_READERS: Final = _SMALL | RISKY


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The documents of a file and of the files inside it, and which of the latter were skipped."""

    documents: tuple[Document, ...]
    skipped: tuple[SkippedFile, ...] = field(default=())


def read_file(path: Path, ctx: ReadContext | None = None) -> ReadFile:
    """Read one file, which may be compressed (`.gz`), and the files inside it.

    Returns:
        The documents, the file's own first. Its `source` is the absolute path; an attachment's source is a path below it.
        `digest` is that of the bytes that were read.

    Raises:
        UnreadableDocument: the file is binary, in an unknown encoding, damaged, password-protected, empty or too large.
        InaccessibleDocument: the file cannot be opened or read. Both messages give the reason without the path.
        MissingExtra: the library for this kind of file is not installed.
    """
    path = path.absolute()
    with _open(path) as stream:
        stored = _all_of(stream, _limit(path))
    run = _FileRun(ctx or ReadContext())
    run.read(str(path), stored)
    return ReadFile(tuple(run.documents), tuple(run.skipped))


@dataclass(slots=True)
class _FileRun:
    """Collects the documents of one file and of the files inside it."""

    ctx: ReadContext
    documents: list[Document] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def read(self, source: str, stored: bytes, depth: int = 0) -> None:
        path = Path(source)
        compressed, kind = path.suffix.lower() == ".gz", content_suffix(path.name)
        data = _decompressed(stored, _limit(path)) if compressed else stored
        if not data.strip():
            raise UnreadableDocument("the file is empty")
        if kind not in _LARGE and (binary := binary_kind(data)):
            raise UnreadableDocument(binary)
        found = _cleaned(_READERS.get(kind, text.read_plain)(data, self.ctx))
        if not found.text.strip():
            raise UnreadableDocument("there is no text in the file")
        title = found.title or (path.stem if compressed else path.name)
        digest = hashlib.sha256(stored).hexdigest()
        self.documents.append(
            Document(source, title, found.text, digest, found.sections, found.notes, found.numbered_lines)
        )
        for attachment in found.attachments[:MAX_ATTACHMENTS]:
            self._read_attachment(source, attachment, depth + 1)

    def _read_attachment(self, outer: str, attachment: Attachment, depth: int) -> None:
        source = free_name(f"{outer}/{_usable(attachment.name)}", self.taken)
        self.taken.add(source)
        try:
            if reason := kind_without_text(source):
                raise UnreadableDocument(reason)
            if depth > MAX_NESTING:
                raise UnreadableDocument("too many e-mails inside each other")
            self.read(source, attachment.data, depth)
        except (UnreadableDocument, MissingExtra) as error:
            self.skipped.append(SkippedFile(Path(source), str(error)))


def _usable(name: str) -> str:
    """Return an attachment's name without the characters that a part of a path cannot have."""
    name = re.sub(r"[\x00-\x1f\x7f\ud800-\udfff/\\]+", "_", name).strip(" .") or "attachment"
    stem, suffix = os.path.splitext(name)
    room = _LONGEST_NAME_BYTES - len(suffix.encode())
    return stem.encode()[: max(room, 1)].decode("utf-8", "ignore") + suffix[:_LONGEST_NAME_BYTES]


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes, as `Document` has it: 64 hex digits. Reads the file piece by piece.

    Raises InaccessibleDocument if the file cannot be opened or read.
    """
    with _open(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """Open a regular file; an OSError, also while it is open, becomes InaccessibleDocument."""
    try:
        # Non-blocking: a pipe may have replaced the file since it was found, and opening a pipe waits for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError("not a regular file")
            yield stream
    except PermissionError as error:
        raise InaccessibleDocument("no permission to read it") from error
    except FileNotFoundError as error:
        raise InaccessibleDocument("it no longer exists") from error
    except OSError as error:
        raise InaccessibleDocument(f"cannot be read: {error.strerror or error}") from error


def _limit(path: Path) -> int:
    return MAX_PDF_BYTES if content_suffix(path.name) in _LARGE else MAX_TEXT_BYTES


def _decompressed(data: bytes, limit: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return _all_of(stream, limit, "unpacked, ")  # a small file may expand to gigabytes
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"damaged gzip file: {error}") from error


def _all_of(stream: io.BufferedIOBase, limit: int, state: str = "") -> bytes:
    data = stream.read(limit + 1)
    if len(data) > limit:
        raise UnreadableDocument(f"{state}larger than {limit // 2**20} MiB; split it into smaller files")
    return data


def _cleaned(found: Extracted) -> Extracted:
    """Remove soft hyphens and other signs of no width, which part a word for the model and for the search; see also `clean`.

    A soft hyphen at the end of a line goes with the line end, unless lines are numbered.
    """
    removed = _INVISIBLE if found.numbered_lines else _INVISIBLE_OR_HYPHENATED
    text, moved = without(removed, found.text)
    sections = tuple(
        replace(
            each,
            start=moved(each.start),
            heading=tuple(_INVISIBLE.sub("", words) for words in each.heading),
            head=removed.sub("", each.head),
        )
        for each in found.sections
    )
    return replace(found, text=clean(text), title=clean(_INVISIBLE.sub("", found.title)), sections=sections)
