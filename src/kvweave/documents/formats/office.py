"""Reads .docx, .pptx and .xlsx with mammoth, python-pptx and calamine, the libraries of the extra `documents`.

A table row becomes a line with tabs between the cells. The first row is repeated with every chunk that is cut from the table.
"""

import io
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from xml.etree import ElementTree

from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder
from kvweave.documents.formats.workbook import UncomputedFormulas
from kvweave.documents.formulas import word_formula_text
from kvweave.documents.html import read_html
from kvweave.errors import UnreadableDocument
from kvweave.extras import require

MAX_UNPACKED_BYTES: Final = 2**30
_OLD_CONTAINER: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_TITLE_STYLES: Final = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"
_CELL: Final = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
_WORD: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_WORD_PICTURES: Final = ("word/media/", "word/embeddings/")
_ROWS_SEARCHED: Final = 20


def read_docx(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the headings, paragraphs, lists, tables and notes of a Word document."""
    require("documents", "reading .docx", "mammoth")
    import mammoth

    with _readable(data, "docx"):
        no_pictures = mammoth.images.img_element(lambda image: {})
        page = mammoth.convert_to_html(
            io.BytesIO(_with_typed_formulas(data)), style_map=_TITLE_STYLES, convert_image=no_pictures
        ).value
        ctx.alive()
        found = read_html(_CELL.sub(_without_paragraphs, page))
        title = _core_title(data) or found.title
    return Extracted(found.text, title, found.sections)


def _without_paragraphs(cell: re.Match[str]) -> str:
    return cell[0].replace("</p><p>", " ")


def _with_typed_formulas(data: bytes) -> bytes:
    """Return a Word file with text in place of its formulas, which mammoth leaves out; it may lack pictures."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if not name.startswith(_WORD_PICTURES)]
        texts = {name: archive.read(name) for name in names if re.fullmatch(r"word/[^/]+\.xml", name)}
        if not any(b"oMath" in text for text in texts.values()):
            return data
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as changed:
            for name in names:
                text = texts.get(name, b"")
                changed.writestr(name, _typed_out(text) if b"oMath" in text else archive.read(name))
    return buffer.getvalue()


def _typed_out(text: bytes) -> bytes:
    """Return a part of a Word file with a run of text in place of each formula."""
    root = ElementTree.fromstring(text)
    for parent in [each for each in root.iter() if not _is_formula(each)]:
        for at, element in enumerate(parent):
            if _is_formula(element):
                parent[at] = _typed(element)
    return ElementTree.tostring(root)


def _is_formula(element: ElementTree.Element) -> bool:
    return element.tag.endswith(("/math}oMath", "/math}oMathPara"))


def _typed(formula: ElementTree.Element) -> ElementTree.Element:
    """Return a run with the text of a formula, and with what follows the formula."""
    run = ElementTree.Element(f"{_WORD}r")
    ElementTree.SubElement(run, f"{_WORD}t").text = word_formula_text(formula)
    run.tail = formula.tail
    return run


def read_pptx(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the text, tables and speaker notes of each slide. The number of the slide is its page."""
    require("documents", "reading .pptx", "pptx")
    import pptx

    built = TextBuilder()
    empty = 0
    with _readable(data, "pptx"):
        shown = pptx.Presentation(io.BytesIO(data))
        for number, slide in enumerate(shown.slides, 1):
            before = built.length
            _add_slide(built, slide, number)
            empty += built.length == before
            ctx.alive()
        title = str(shown.core_properties.title or "")
        count = len(shown.slides)
    notes = (f"{empty} of {count} slides have no text (pictures?)",) if empty else ()
    return Extracted(built.text(), title, tuple(built.sections), notes)


def _add_slide(built: TextBuilder, slide: Any, number: int) -> None:
    title_shape = slide.shapes.title
    title = title_shape.text_frame.text.strip() if title_shape is not None else ""
    heading = (title,) if title else ()
    if title:
        built.mark(number, heading)
        built.add(title + "\n\n")
    for shape in _shapes(slide.shapes):
        if getattr(shape, "has_table", False):
            rows = [[cell.text for cell in row.cells] for row in shape.table.rows]
            _add_table(built, rows, number, heading)
        elif shape.has_text_frame and shape.text_frame.text.strip() and shape != title_shape:
            built.mark(number, heading)
            built.add(shape.text_frame.text.strip().replace("\v", "\n") + "\n\n")
    if slide.has_notes_slide:
        said = slide.notes_slide.notes_text_frame
        if said is not None and said.text.strip():
            built.mark(number, heading)
            built.add(f"Notes: {said.text.strip()}\n\n")


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        else:
            yield shape


def read_xlsx(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the values of each sheet of a workbook. A formula has its last computed value, or else the formula itself.

    The sheet's name is its heading.
    """
    require("documents", "reading .xlsx", "python_calamine")
    from python_calamine import CalamineWorkbook, SheetTypeEnum

    built, missing = TextBuilder(), 0
    with _readable(data, "xlsx"):
        book, formulas = CalamineWorkbook.from_filelike(io.BytesIO(data)), UncomputedFormulas(data)
        for each in book.sheets_metadata:
            if each.typ == SheetTypeEnum.WorkSheet:
                found = formulas.of_sheet(each.name)
                missing += len(found)
                _add_sheet(built, each.name, _rows(book.get_sheet_by_name(each.name), found))
            ctx.alive()
        title = _core_title(data)
    note = (
        f"{missing:,} formulas have no stored result; open the workbook in a spreadsheet program and save it"
    )
    return Extracted(built.text(), title, tuple(built.sections), (note,) if missing else ())


def _rows(sheet: Any, formulas: dict[tuple[int, int], str]) -> list[list[str]]:
    """Return the rows that are not empty, with these formulas in their cells."""
    before = [""] * (
        sheet.start[1] if sheet.start else 0
    )  # rows are whole from the sheet's first, columns are not
    rows = [before + [_cell(value) for value in row] for row in sheet.iter_rows()]
    for (row, column), formula in formulas.items():
        rows += ([] for _ in range(len(rows), row + 1))
        rows[row] += [""] * (column + 1 - len(rows[row]))
        rows[row][column] = formula
    return [row for row in rows if any(row)]


def _add_sheet(built: TextBuilder, name: str, rows: list[list[str]]) -> None:
    if not rows:
        return
    built.mark(heading=(name,))
    built.add(f"{name}\n\n")
    width = max(sum(map(bool, row)) for row in rows[:_ROWS_SEARCHED])
    header = next(n for n, row in enumerate(rows) if sum(map(bool, row)) >= 0.6 * width)
    for row in rows[:header]:  # a caption above the table
        built.add(" ".join(filter(None, row)) + "\n")
    _add_table(built, rows[header:], None, (name,))


def _add_table(
    built: TextBuilder, rows: Sequence[Sequence[str]], page: int | None, heading: Sequence[str]
) -> None:
    width = max((n for row in rows for n, cell in enumerate(row, 1) if cell.strip()), default=0)
    lines = ["\t".join(" ".join(cell.split()) for cell in row[:width]).rstrip() + "\n" for row in rows]
    lines = [line for line in lines if line.strip()]
    if not lines:
        return
    built.mark(page, heading, head=lines[0] if len(lines) > 1 else "")
    built.add("".join(lines))
    built.mark(page, heading)
    built.add("\n")


def _cell(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _core_title(data: bytes) -> str:
    """Return the title from the properties of an Office file; empty if it has none."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            root = ElementTree.fromstring(archive.read("docProps/core.xml"))
        return (root.findtext("{http://purl.org/dc/elements/1.1/}title") or "").strip()
    except (KeyError, ElementTree.ParseError):
        return ""


@contextmanager
def _readable(data: bytes, kind: str) -> Iterator[None]:
    """Check the container; turn errors that a library raises for a damaged file into UnreadableDocument."""
    check_container(data, kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about styles and extensions that are not read
            yield
    except (UnreadableDocument, MemoryError):
        raise
    except Exception as error:  # a damaged file may cause any exception
        raise UnreadableDocument(f"damaged .{kind} ({type(error).__name__}: {error})") from error


def check_container(data: bytes, kind: str) -> None:
    """Raise UnreadableDocument if a zip container is password-protected, damaged or too large, or is an old office file."""
    if data.startswith(_OLD_CONTAINER):
        if "EncryptedPackage".encode("utf-16-le") in data:
            raise UnreadableDocument(f"password-protected .{kind}; save a copy without a password")
        raise UnreadableDocument(f"an old office file that is called .{kind}; save it as .{kind}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise UnreadableDocument(f"damaged .{kind} ({error})") from error
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableDocument(f"password-protected .{kind}; save a copy without a password")
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise UnreadableDocument(f"unpacked, larger than {MAX_UNPACKED_BYTES // 2**20} MiB")
