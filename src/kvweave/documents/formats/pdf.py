"""Reads the text of PDF pages with pypdf. The outline gives the headings."""

import io
import logging
from types import ModuleType
from typing import Any

from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder, clean
from kvweave.errors import UnreadableDocument
from kvweave.extras import require

LOCKED = "PDF is password-protected (encrypted); save a copy without a password"


def read_pdf(data: bytes, ctx: ReadContext) -> Extracted:
    """Read a PDF, with a blank line between pages; the title comes from the metadata and may be empty.

    Raises:
        MissingExtra: pypdf is not installed.
        UnreadableDocument: the PDF is password-protected, damaged, or has no text layer.
    """
    pypdf = _import_pypdf()
    try:
        reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableDocument(LOCKED)
        pages, damage = _page_texts(reader, ctx)
        title = str((reader.metadata and reader.metadata.title) or "")
        headings = _headings(reader) if any(pages) else {}
    except UnreadableDocument:
        raise
    except pypdf.errors.DependencyError as error:
        raise UnreadableDocument(LOCKED) from error
    except Exception as error:  # a damaged file may cause any exception
        raise UnreadableDocument(f"damaged PDF ({type(error).__name__}: {error})") from error
    if not any(pages) and damage:
        raise UnreadableDocument(f"damaged PDF ({damage[0]})")
    if not any(pages):
        raise UnreadableDocument("PDF without a text layer (scanned pages?); run it through OCR first")
    return _put_together(pages, len(damage), headings, clean(title.strip()))


def _page_texts(reader: Any, ctx: ReadContext) -> tuple[list[str], list[str]]:
    """Return the text of each page, empty for a scanned or damaged page, and the errors of the damaged pages."""
    texts, damage = list[str](), list[str]()
    for page in reader.pages:
        try:
            texts.append(clean(page.extract_text()).strip())
        except Exception as error:
            texts.append("")
            damage.append(f"{type(error).__name__}: {error}")
        ctx.alive()
    return texts, damage


def _put_together(
    pages: list[str], damaged: int, headings: dict[int, tuple[str, ...]], title: str
) -> Extracted:
    built, heading = TextBuilder(), tuple[str, ...]()
    for number, text in enumerate(pages, 1):
        heading = headings.get(number, heading)
        if text:
            built.add("\n\n" if built.length else "")
            built.mark(page=number, heading=heading)
            built.add(text)
    left_out = (
        (pages.count("") - damaged, "have no text (scanned pages?)"),
        (damaged, "are damaged and left out"),
    )
    notes = tuple(f"{count} of {len(pages)} pages {what}" for count, what in left_out if count)
    return Extracted(built.text(), title, tuple(built.sections), notes)


def _headings(reader: Any) -> dict[int, tuple[str, ...]]:
    """Return the path of the first heading on each page (from 1) with an entry in the outline."""
    found: dict[int, tuple[str, ...]] = {}

    def walk(entries: list[Any], path: tuple[str, ...]) -> None:
        last = path
        for entry in entries:
            if isinstance(entry, list):
                walk(entry, last)
                continue
            last = (*path, str(entry.title))
            number = reader.get_destination_page_number(entry)
            if number is not None and number >= 0:
                found.setdefault(number + 1, last)

    try:
        walk(list(reader.outline), ())
    except Exception:  # outlines are often damaged, and the text is good without them
        return {}
    return found


def _import_pypdf() -> ModuleType:
    require("pdf", "reading PDF", "pypdf")
    import pypdf  # optional, so not at the top
    import pypdf.errors

    # Warnings about sloppy files are not for the user; real damage is raised. The level is set once, by the first thread,
    # and not at all if the application has chosen one.
    logger = logging.getLogger("pypdf")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    module: ModuleType = pypdf
    return module
