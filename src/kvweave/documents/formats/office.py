"""Reads Word, PowerPoint, workbooks and EPUB books with mammoth, python-pptx, calamine and the standard library.

A table row becomes a line with tabs between the cells. The first row is repeated with every chunk that is cut from the table.
"""

import html
import io
import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from typing import Any, Final
from urllib.parse import unquote
from xml.etree import ElementTree

from kvweave.documents.encodings import decode
from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder, damaged
from kvweave.documents.formulas import office_formula_text
from kvweave.documents.html import read_html
from kvweave.errors import UnreadableDocument
from kvweave.extras import require

MAX_UNPACKED_BYTES: Final = 2**30
_OLD_CONTAINER: Final = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_TITLE: Final = "{http://purl.org/dc/elements/1.1/}title"
_TITLE_STYLES: Final = "p[style-name='Title'] => h1:fresh\np[style-name='Subtitle'] => p:fresh"
_CELL: Final = re.compile(r"<t([dh])\b.*?</t\1>", re.DOTALL)
_WORD: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_WORD_PICTURES: Final = ("word/media/", "word/embeddings/")
_ROWS_SEARCHED: Final = 20
_UNREAD_CELL: Final = re.compile(
    rb"<(?:\w+:)?c\b(?=[^<>]*\bt\s*=\s*[\"']e[\"']|[^<>]*>\s*<(?:\w+:)?f\b)([^<>]*)>\s*"  # an error or a formula
    rb"(?:<(?:\w+:)?f\b[^<>]*(?:/>|>([^<]*)</(?:\w+:)?f>)\s*)?"
    rb"(?:<(?:\w+:)?v\s*(?:/>|>([^<]*)</(?:\w+:)?v>))?"
)
_REFERENCE: Final = re.compile(rb"""\br\s*=\s*["']([A-Z]{1,3})([0-9]{1,7})["']""")
_BOOK_PAGES: Final = frozenset({"application/xhtml+xml", "text/html"})


def read_docx(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the headings, paragraphs, lists, tables and notes of a Word document."""
    require("documents", "reading .docx", "mammoth")
    import mammoth

    with _readable(data, ".docx"):
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
    """Return a Word file without pictures, and with text in place of its formulas, which mammoth leaves out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(buffer, "w") as changed:
        for name in archive.namelist():
            if not name.startswith(_WORD_PICTURES):
                part = archive.read(name)
                has_formulas = b"oMath" in part and name.endswith(".xml")
                changed.writestr(name, _typed_out(part) if has_formulas else part)
    return buffer.getvalue()


def _typed_out(part: bytes) -> bytes:
    """Return a part of a Word file with a run of text in place of each formula."""
    root = ElementTree.fromstring(part)
    for parent in list(root.iter()):
        for at, element in enumerate(parent):
            if element.tag.endswith(("/math}oMath", "/math}oMathPara")):
                parent[at] = run = ElementTree.Element(f"{_WORD}r")
                ElementTree.SubElement(run, f"{_WORD}t").text = office_formula_text(element)
                run.tail = element.tail
    return ElementTree.tostring(root)


def read_pptx(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the text, tables and speaker notes of each slide. The number of the slide is its page."""
    require("documents", "reading .pptx", "pptx")
    import pptx

    built = TextBuilder()
    empty = 0
    with _readable(data, ".pptx"):
        shown = pptx.Presentation(io.BytesIO(data))
        for number, slide in enumerate(shown.slides, 1):
            before = built.length
            _type_out_formulas(slide)
            _add_slide(built, slide, number)
            empty += built.length == before
            ctx.alive()
        title, count = _core_title(data), len(shown.slides)
    notes = (f"{empty} of {count} slides have no text (pictures?)",) if empty else ()
    return Extracted(built.text(), title, tuple(built.sections), notes)


def _type_out_formulas(slide: Any) -> None:
    """Put text in place of a slide's formulas. Shapes with formulas have alternatives, which python-pptx passes over."""
    for both in list(slide.element.iter("{*}AlternateContent")):
        if (choice := both.find("{*}Choice[@Requires='a14']")) is not None:
            for shape in list(choice):
                both.addprevious(shape)
            both.getparent().remove(both)
    for formula in list(slide.element.iter("{http://schemas.microsoft.com/office/drawing/2010/main}m")):
        paragraph = formula.getparent()
        paragraph.replace(formula, paragraph.add_r("".join(map(office_formula_text, formula))))


def _add_slide(built: TextBuilder, slide: Any, number: int) -> None:
    title_shape = slide.shapes.title
    title = title_shape.text_frame.text.strip() if title_shape is not None else ""
    heading = (title,) if title else ()

    def add(text: str, before: str = "") -> None:
        if text.strip():
            built.mark(number, heading)
            built.add(before + text.strip().replace("\v", "\n") + "\n\n")

    add(title)
    for shape in _shapes(slide.shapes):
        if getattr(shape, "has_table", False):
            rows = [[cell.text for cell in row.cells] for row in shape.table.rows]
            _add_table(built, rows, number, heading)
        elif shape.has_text_frame and shape != title_shape:
            add(shape.text_frame.text)
    if slide.has_notes_slide and (said := slide.notes_slide.notes_text_frame) is not None:
        add(said.text, "Notes: ")


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        else:
            yield shape


def read_workbook(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the values of each sheet of a workbook. A formula has its last computed value, or else the formula itself.

    The sheet's name is its heading.
    """
    require("documents", "reading workbooks", "python_calamine")
    from python_calamine import CalamineWorkbook, PasswordError, SheetTypeEnum

    built = TextBuilder()
    with _readable(data, "workbook"):
        unread = _unread_cells(data)
        try:
            book = CalamineWorkbook.from_filelike(io.BytesIO(data))
        except PasswordError:
            raise UnreadableDocument(_locked("workbook")) from None
        for name in (each.name for each in book.sheets_metadata if each.typ == SheetTypeEnum.WorkSheet):
            _add_sheet(built, name, _rows(book.get_sheet_by_name(name), unread.get(name, {})))
            ctx.alive()
        title = _core_title(data)
    missing = sum(text.startswith("=") for cells in unread.values() for text in cells.values())
    note = (
        f"{missing:,} formulas have no stored result; open the workbook in a spreadsheet program and save it"
    )
    return Extracted(built.text(), title, tuple(built.sections), (note,) if missing else ())


def _unread_cells(data: bytes) -> dict[str, dict[tuple[int, int], str]]:
    """Return what calamine leaves empty in .xlsx, by sheet, and by row and column from 0: "#N/A", and "=B2*C2" without result.

    A program that writes a workbook without computing it leaves results out, or writes 0 and asks to compute all on loading.
    """
    found: dict[str, dict[tuple[int, int], str]] = {}
    with (
        suppress(KeyError, ElementTree.ParseError, zipfile.BadZipFile),
        zipfile.ZipFile(io.BytesIO(data)) as archive,
    ):
        book = ElementTree.fromstring(archive.read("xl/workbook.xml"))
        relations = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))
        targets = {each.get("Id"): each.get("Target", "") for each in relations}
        settings = book.find("./{*}calcPr")
        on_loading = settings is not None and settings.get("fullCalcOnLoad") in ("1", "true")
        for sheet in book.iterfind("./{*}sheets/{*}sheet"):
            identity = next((value for key, value in sheet.attrib.items() if key.endswith("}id")), "")
            part = archive.read(posixpath.join("/xl", targets.get(identity, "")).lstrip("/"))
            cells = found[sheet.get("name", "")] = {}
            for cell in _UNREAD_CELL.finditer(part):
                attributes, formula, value = cell.groups(default=b"")
                place = _REFERENCE.search(attributes)
                no_result = not value or (value == b"0" and on_loading)
                if place and (no_result or value.startswith(b"#")):
                    text = b"=" + formula if no_result else value
                    at = int(place[2]) - 1, _column(place[1])
                    cells[at] = html.unescape(text.decode("utf-8", "replace"))
    return found


def _column(letters: bytes) -> int:
    """Return the number of a column, from 0: "A" is 0, "AB" is 27."""
    return reduce(lambda number, letter: number * 26 + letter - ord("A") + 1, letters, 0) - 1


def _rows(sheet: Any, unread: dict[tuple[int, int], str]) -> list[list[str]]:
    """Return the rows that are not empty, with these texts in the cells that calamine has not read."""
    # calamine's rows begin with the sheet's first row, but their cells with the first column that is not empty
    before = [""] * (sheet.start[1] if sheet.start else 0)
    rows = [before + [_cell(value) for value in row] for row in sheet.iter_rows()]
    for (row, column), text in unread.items():
        rows += ([] for _ in range(len(rows), row + 1))
        rows[row] += [""] * (column + 1 - len(rows[row]))
        rows[row][column] = text
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


def read_epub(data: bytes, ctx: ReadContext) -> Extracted:
    """Read a book in the order of its spine; the headings of its chapters become those of the sections.

    Raises UnreadableDocument for a damaged book and for one with copy protection.
    """
    built, notes = TextBuilder(), list[str]()
    with _readable(data, "EPUB"), zipfile.ZipFile(io.BytesIO(data)) as book:
        if "META-INF/rights.xml" in book.namelist() or "META-INF/license.lcpl" in book.namelist():
            raise UnreadableDocument("EPUB with copy protection (DRM)")
        title, chapters = _chapters(book)
        for name in chapters:
            markup, note = decode(book.read(name))
            notes += [f"{name}: {note}"] if note else []
            page = read_html(markup)
            built.add_sections(page.text + "\n" if page.text else "", page.sections)
            ctx.alive()
    return Extracted(built.text(), title, tuple(built.sections), tuple(notes))


def _chapters(book: zipfile.ZipFile) -> tuple[str, list[str]]:
    """Return the book's title, and the names of its pages in reading order."""
    container = ElementTree.fromstring(book.read("META-INF/container.xml"))
    package_name = unquote(next(container.iterfind(".//{*}rootfile")).get("full-path", ""))
    package = ElementTree.fromstring(book.read(package_name))
    folder = posixpath.dirname(package_name)
    items = {
        item.get("id", ""): posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in package.iterfind(".//{*}manifest/{*}item")
        if item.get("media-type") in _BOOK_PAGES
    }
    spine = [each.get("idref", "") for each in package.iterfind(".//{*}spine/{*}itemref")]
    title = package.findtext(f".//{_TITLE}") or ""
    present = set(book.namelist())
    return " ".join(title.split()), [items[each] for each in spine if items.get(each) in present]


def _core_title(data: bytes) -> str:
    """Return the title from the properties of an Office file; empty if it has none."""
    with suppress(KeyError, ElementTree.ParseError, zipfile.BadZipFile):
        root = ElementTree.fromstring(zipfile.ZipFile(io.BytesIO(data)).read("docProps/core.xml"))
        return (root.findtext(_TITLE) or "").strip()
    return ""


@contextmanager
def _readable(data: bytes, kind: str) -> Iterator[None]:
    """Check the container; turn errors that a library raises for a damaged file into UnreadableDocument."""
    with damaged(kind), warnings.catch_warnings():
        _check_container(data, kind)
        warnings.simplefilter("ignore")  # they are about styles and extensions that are not read
        yield


def _check_container(data: bytes, kind: str) -> None:
    """Raise UnreadableDocument if a zip container is password-protected or too large, or is an old office file."""
    if data.startswith(_OLD_CONTAINER):
        if "EncryptedPackage".encode("utf-16-le") in data:
            raise UnreadableDocument(_locked(kind))
        if kind == "workbook":
            return  # .xls
        raise UnreadableDocument(f"an old office file that is called {kind}; save it as {kind}")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableDocument(_locked(kind))
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise UnreadableDocument(f"unpacked, larger than {MAX_UNPACKED_BYTES // 2**20} MiB")


def _locked(kind: str) -> str:
    return f"password-protected {kind}; save a copy without a password"
