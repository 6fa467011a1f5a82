"""Reads the text of PDF pages with pypdf, and what was typed into a form. The outline gives the headings."""

import io
import logging
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, cast

from kvweave.documents.encodings import decode
from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder, clean, damaged, reason
from kvweave.errors import UnreadableDocument
from kvweave.extras import require

_XFA: Final = "a form in XFA, whose entries may be missing; print it to another PDF"
_HIDDEN: Final = 1 << 1
_PASSWORD: Final = 1 << 13
_PUSH_BUTTON: Final = 1 << 16
_MAX_FIELD_DEPTH: Final = 20
LOCKED = "PDF is password-protected (encrypted); save a copy without a password"


def read_pdf(data: bytes, ctx: ReadContext) -> Extracted:
    """Read a PDF, with a blank line between pages; the title comes from the metadata and may be empty.

    Raises:
        MissingExtra: pypdf is not installed, or the PDF is encrypted and the library for that is not installed.
        UnreadableDocument: the PDF is password-protected, damaged, or has no text layer.
    """
    pypdf = _import_pypdf()
    with damaged("PDF"):
        try:
            reader = pypdf.PdfReader(io.BytesIO(data), strict=False)
            if reader.is_encrypted:
                require("pdf", "reading an encrypted PDF", "cryptography")
                if not reader.decrypt(""):
                    raise UnreadableDocument(LOCKED)
            pages, damage = _page_texts(reader, ctx)
            title = str((reader.metadata and reader.metadata.title) or "")
            headings = _headings(reader) if any(pages) else {}
            is_xfa = _is_xfa(reader)
        except pypdf.errors.DependencyError as error:
            require("pdf", "reading an encrypted PDF", "cryptography")
            raise UnreadableDocument(f"encrypted PDF that cannot be decrypted ({reason(error)})") from error
    if not any(pages) and damage:
        raise UnreadableDocument(f"damaged PDF ({damage[0]})")
    if not any(pages):
        raise UnreadableDocument("PDF without a text layer (scanned pages?); run it through OCR first")
    return _put_together(pages, len(damage), headings, clean(title.strip()), is_xfa)


def _page_texts(reader: Any, ctx: ReadContext) -> tuple[list[str], list[str]]:
    """Return the text of each page, empty for a scanned or damaged page, and the errors of the damaged pages."""
    texts, damage = list[str](), list[str]()
    for page in reader.pages:
        try:
            shown = clean(page.extract_text()).strip()
            entries = clean("".join(f"{entry}\n" for entry in _entries(page)))
            texts.append(f"{shown}\n\n{entries}".strip())
        except Exception as error:
            texts.append("")
            damage.append(reason(error))
        ctx.alive()
    return texts, damage


def _is_xfa(reader: Any) -> bool:
    """Return whether the PDF has a form in Adobe's XML, whose fields need not be those of the PDF."""
    with suppress(Exception):
        form = reader.trailer["/Root"].get("/AcroForm")
        return form is not None and "/XFA" in form.get_object()
    return False


def _entries(page: Any) -> list[str]:
    """Return what was typed into the fields of a page, as "label: entry", and the notes that were typed onto it."""
    found = list[str]()
    with suppress(Exception):  # the text of the page and the entries before a damaged one are good without it
        for reference in page.get("/Annots", None) or ():
            note = reference.get_object()
            if not isinstance(note, dict) or _number(note.get("/F")) & _HIDDEN:
                continue
            if note.get("/Subtype") == "/FreeText" and note.get("/Contents"):
                found.append(str(note["/Contents"]))
            elif note.get("/Subtype") == "/Widget":
                field = _inherited(note)
                label = " ".join(str(field.get("/TU") or field.get("/T") or "").split())
                if entry := _entry(field):
                    found.append(f"{label}: {entry}" if label else entry)
    return found


def _inherited(widget: Any) -> dict[str, Any]:
    """Return a field's keys that are used here, with those it inherits from its parents."""
    found: dict[str, Any] = {}
    level, depth = widget, 0
    while isinstance(level, dict) and depth < _MAX_FIELD_DEPTH:
        for key in ("/FT", "/Ff", "/V", "/T", "/TU", "/AS"):
            if key in level:
                found.setdefault(key, level[key].get_object())
        level, depth = level.get("/Parent"), depth + 1
        level = level.get_object() if level is not None else None
    return found


def _entry(field: dict[str, Any]) -> str:
    """Return a field's entry; "yes" for a ticked box, and nothing for an empty field, a button, a password or a signature."""
    kind, value = field.get("/FT"), field.get("/V")
    if kind == "/Btn":
        state = str(field.get("/AS") or value or "/Off").removeprefix("/")
        if state == "Off" or _number(field.get("/Ff")) & _PUSH_BUTTON:
            return ""
        return "yes" if state.lower() in ("yes", "on", "1") else state
    is_password = kind == "/Tx" and _number(field.get("/Ff")) & _PASSWORD
    if value is None or kind not in ("/Tx", "/Ch") or is_password:
        return ""
    values = value if isinstance(value, list) else [value]
    return ", ".join(_typed(each.get_object()) for each in values).strip()


def _typed(value: Any) -> str:
    """Return a text of a PDF, which may be long and therefore a stream."""
    return decode(value.get_data()).text if hasattr(value, "get_data") else str(value)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _put_together(
    pages: list[str], damaged: int, headings: dict[int, tuple[str, ...]], title: str, is_xfa: bool
) -> Extracted:
    built, heading = TextBuilder(), tuple[str, ...]()
    for number, text in enumerate(pages, 1):
        heading = headings.get(number, heading)
        if text:
            built.add("\n\n" if built.length else "")
            built.mark(page=number, heading=heading)
            built.add(text)
    empty = pages.count("") - damaged
    left_out = ((empty, "have no text (scanned pages?)"), (damaged, "are damaged and left out"))
    notes = [f"{count} of {len(pages)} pages {what}" for count, what in left_out if count]
    notes += [_XFA] if is_xfa else []
    return Extracted(built.text(), title, tuple(built.sections), tuple(notes))


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

    with suppress(Exception):  # outlines are often damaged, and the text is good without them
        walk(list(reader.outline), ())
        return found
    return {}


def _import_pypdf() -> ModuleType:
    require("pdf", "reading PDF", "pypdf")
    import pypdf.errors  # optional, so not at the top

    # Warnings about sloppy files are not for the user; real damage is raised. The level is set once, by the first thread,
    # and not at all if the application has chosen one.
    logger = logging.getLogger("pypdf")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    return cast(ModuleType, pypdf)
