"""Files of many formats, made for the tests of their readers."""

import io
import zipfile
from collections.abc import Sequence
from email.message import EmailMessage
from pathlib import Path

from fpdf import FPDF

from kvweave.documents.readers import read_file
from kvweave.types import Document

ROWS = [("Name", "Town", "Year"), *((f"Person{n}", f"Town{n}", 1900 + n) for n in range(200))]


def pdf(*pages: str, title: str = "", password: str = "", headings: Sequence[str] = ()) -> bytes:
    made = FPDF()
    made.set_font("helvetica", size=12)
    if title:
        made.set_title(title)
    for number, page in enumerate(pages):
        made.add_page()
        if number < len(headings):
            made.start_section(headings[number])
        if page:
            made.multi_cell(0, 8, page)
    if password:
        made.set_encryption(owner_password=password, user_password=password)
    return bytes(made.output())


def pdf_of_codes(codes: bytes, meanings: dict[int, str]) -> bytes:
    """Return a PDF that shows these codes, each of which means UTF-16 units in hex: also halves of a surrogate pair."""
    mapped = "\n".join(f"<{code:02x}> <{units}>" for code, units in meanings.items())
    cmap = f"/CIDInit /ProcSet findresource begin begincmap\n{len(meanings)} beginbfchar\n{mapped}\nendbfchar\nendcmap end"
    content = f"BT /F1 12 Tf 72 700 Td <{codes.hex()}> Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >>",
        f"<< /Length {len(cmap)} >>\nstream\n{cmap}\nendstream",
    ]
    return _pdf_of_objects(objects)


def _pdf_of_objects(objects: Sequence[str]) -> bytes:
    made, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(made))
        made += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(made)}\n%%EOF"
    return f"{made}xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


def pdf_form(*fields: str) -> bytes:
    """Return a PDF of one page with the text "Lease" and these annotations, which are PDF dictionaries without brackets."""
    content = "BT /F1 12 Tf 72 700 Td (Lease) Tj ET"
    numbers = range(6, 6 + len(fields))
    shown = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [{shown}] >> >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents 4 0 R"
        f" /Resources << /Font << /F1 5 0 R >> >> /Annots [{shown}] >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        *(f"<< /Type /Annot /Rect [0 0 9 9] {field} >>" for field in fields),
    ]
    return _pdf_of_objects(objects)


def docx() -> bytes:
    import docx as library

    made = library.Document()
    made.core_properties.title = "Harbour rules"
    made.add_heading("Opening", 1)
    made.add_paragraph("The harbour opens at six.")
    made.add_heading("Fees", 2)
    table = made.add_table(rows=0, cols=3)
    for row in ROWS:
        for cell, value in zip(table.add_row().cells, row, strict=True):
            cell.text = str(value)
    made.add_heading("Closing", 1)
    made.add_paragraph("It closes at noon.")
    return _saved(made)


def pptx() -> bytes:
    import pptx as library

    made = library.Presentation()
    for title, body in (("Opening", "The harbour opens at six."), ("Closing", "It closes at noon.")):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
    slide.notes_slide.notes_text_frame.text = "Mention the bell."
    table = slide.shapes.add_table(3, 3, 0, 0, 999999, 999999).table
    for number, row in enumerate(ROWS[:3]):
        for column, value in enumerate(row):
            table.cell(number, column).text = str(value)
    made.slides.add_slide(made.slide_layouts[6])
    return _saved(made)


def xlsx() -> bytes:
    import openpyxl as library

    made = library.Workbook()
    people = made.active
    people.title = "People"
    people.append(["All people we know"])
    people.append([])
    for row in ROWS:
        people.append(row)
    made.create_sheet("Empty")
    fees = made.create_sheet("Fees")
    fees.append(["Ship", "Fee"])
    fees.append(["Albatros", 12.5])
    return _saved(made)


def _saved(made: object) -> bytes:
    buffer = io.BytesIO()
    made.save(buffer)  # type: ignore[attr-defined]
    return buffer.getvalue()


def epub() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        book.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/content.opf"/></rootfiles></container>',
        )
        book.writestr(
            "OEBPS/content.opf",
            '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
            "<dc:title>The Harbour</dc:title></metadata><manifest>"
            '<item id="b" href="two.xhtml" media-type="application/xhtml+xml"/>'
            '<item id="a" href="text/one%201.xhtml" media-type="application/xhtml+xml"/>'
            '<item id="c" href="cover.png" media-type="image/png"/></manifest>'
            '<spine><itemref idref="c"/><itemref idref="a"/><itemref idref="b"/></spine></package>',
        )
        book.writestr(
            "OEBPS/text/one 1.xhtml", "<html><body><h1>Dawn</h1><p>The boats leave.</p></body></html>"
        )
        book.writestr("OEBPS/two.xhtml", "<html><body><h1>Dusk</h1><p>The boats return.</p></body></html>")
    return buffer.getvalue()


def mail(
    body: str = "The password is walnut.",
    subject: str = "The pässword",
    sender: str = "Zoé <zoe@example.org>",
    identity: str = "<1@example.org>",
    answers: str = "",
    html: bool = False,
) -> EmailMessage:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = sender, "Ivan <ivan@example.org>", subject
    made["Date"] = "Mon, 05 Jan 2026 10:00:00 +0000"
    made["Message-ID"] = identity
    if answers:
        made["In-Reply-To"] = answers
    made.set_content(body, subtype="html" if html else "plain")
    return made


def mbox(*messages: EmailMessage) -> bytes:
    return b"\n".join(b"From someone Mon Jan  5 10:00:00 2026\n" + bytes(each) for each in messages)


def read_document(path: Path) -> Document:
    """Return the file's own document."""
    return read_file(path).documents[0]
