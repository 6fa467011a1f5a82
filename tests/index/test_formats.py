"""Each format is read with its structure: headings, pages, tables and their heads; what cannot be read is named."""

import base64
import io
import json
import sys
import time
import zipfile
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

import pytest

from kvweave.documents.extracted import ReadContext, damaged
from kvweave.documents.formats.mail import message_ids
from kvweave.documents.readers import read_file
from kvweave.errors import MissingExtra, UnreadableDocument
from support import document_files as files
from support.document_files import read_document


def written(folder, name, data):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def headings(document):
    """Return the heading path at each section's first words."""
    return {document.text[s.start :].split("\n")[0]: s.heading for s in document.sections}


def heads(document):
    return [section.head for section in document.sections if section.head]


def test_surrogate_pairs_of_a_pdf_are_joined(tmp_path):
    data = files.pdf_of_codes(b"\x41\x01\x02\x42\x01", {0x41: "0041", 1: "d835", 2: "dc00", 0x42: "0042"})
    assert read_document(written(tmp_path, "a.pdf", data)).text == "A\U0001d400B\ufffd"


def test_pages_without_text_are_counted(tmp_path):
    document = read_document(written(tmp_path, "a.pdf", files.pdf(*[""] * 9, "The harbour opens.")))
    assert document.text == "The harbour opens."
    assert [note for note in document.notes if "9 of 10 pages have no text" in note]
    assert [section.page for section in document.sections] == [10]
    assert read_document(written(tmp_path, "b.pdf", files.pdf("One.", "Two."))).notes == ()


def test_a_damaged_page_costs_that_page(tmp_path, monkeypatch):
    import pypdf

    whole = pypdf.PageObject.extract_text

    def broken(page, *args, **options):
        text = whole(page, *args, **options)
        if "Two" in text:
            raise KeyError("/Font")
        return text

    monkeypatch.setattr(pypdf.PageObject, "extract_text", broken)
    document = read_document(written(tmp_path, "a.pdf", files.pdf("One.", "Two.", "")))
    assert document.text == "One."
    assert document.notes == (
        "1 of 3 pages have no text (scanned pages?)",
        "1 of 3 pages are damaged and left out",
    )
    with pytest.raises(UnreadableDocument, match="damaged PDF"):
        read_document(written(tmp_path, "b.pdf", files.pdf("Two.", "")))


def test_what_was_typed_into_a_form_is_read(tmp_path):
    widget = "/Subtype /Widget"
    data = files.pdf_form(
        f"{widget} /FT /Tx /T (tenant) /V (Norbert Vale)",
        f"{widget} /FT /Tx /T (f1) /TU (Rent in coins) /V (82)",
        f"{widget} /FT /Tx /T (empty) /V ()",
        f"{widget} /FT /Ch /T (boats) /V [(Canoe) (Raft)]",
        f"{widget} /FT /Btn /T (pets) /V /Yes /AS /Yes",
        f"{widget} /FT /Btn /T (smoker) /V /Off /AS /Off",
        f"{widget} /FT /Tx /Ff 8192 /T (code) /V (hunter2)",
        f"{widget} /F 2 /FT /Tx /T (invisible) /V (no)",
        f"{widget} /Parent << /FT /Tx /T (town) /V (Sendbel) >>",
        "/Subtype /FreeText /Contents (Paid in May.)",
    )
    document = read_document(written(tmp_path, "a.pdf", data))
    entries = (
        "tenant: Norbert Vale\nRent in coins: 82\nboats: Canoe, Raft\npets: yes\ntown: Sendbel\nPaid in May."
    )
    assert document.text == f"Lease\n\n{entries}"
    assert document.notes == ()
    xfa = read_document(written(tmp_path, "b.pdf", data.replace(b"/AcroForm <<", b"/AcroForm << /XFA ()")))
    assert "XFA" in xfa.notes[0]
    assert [section.page for section in document.sections] == [1]


@pytest.mark.parametrize("algorithm", ["AES-128", "AES-256"])
def test_a_pdf_that_anyone_may_open_is_read_though_it_is_encrypted(tmp_path, monkeypatch, algorithm):
    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(files.pdf("The word is lantern.")))
    writer.encrypt("", "owner", algorithm=algorithm)
    path = tmp_path / "a.pdf"
    writer.write(path)
    assert read_document(path).text == "The word is lantern."
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"cryptography.*kvweave\[pdf\]"):
        read_document(path)


def test_the_pages_of_a_pdf_have_numbers_and_the_headings_of_its_outline(tmp_path):
    data = files.pdf("One.", "Two.", "Three.", headings=["Opening", "Closing"])
    document = read_document(written(tmp_path, "a.pdf", data))
    places = [(section.page, section.heading) for section in document.sections]
    assert places == [(1, ("Opening",)), (2, ("Closing",)), (3, ("Closing",))]
    assert [document.text[section.start :].split("\n")[0] for section in document.sections] == [
        "One.",
        "Two.",
        "Three.",
    ]


def test_word(tmp_path):
    document = read_document(written(tmp_path, "a.docx", files.docx()))
    assert document.title == "Harbour rules"
    assert headings(document)["Opening"] == ("Opening",)
    assert headings(document)["Fees"] == ("Opening", "Fees")
    assert headings(document)["Closing"] == ("Closing",)
    assert heads(document) == ["Name\tTown\tYear\n"]
    assert "Person7\tTown7\t1907" in document.text


def test_presentation(tmp_path):
    document = read_document(written(tmp_path, "a.pptx", files.pptx()))
    pages = {document.text[s.start :].split("\n")[0]: (s.page, s.heading) for s in document.sections}
    assert pages["The harbour opens at six."] == (1, ("Opening",))
    assert pages["Notes: Mention the bell."] == (2, ("Closing",))
    assert pages["Name\tTown\tYear"] == (2, ("Closing",))
    assert document.notes == ("1 of 3 slides have no text (pictures?)",)
    assert document.text.count("Opening") == 1


def test_workbook(tmp_path):
    document = read_document(written(tmp_path, "a.xlsx", files.xlsx()))
    assert "All people we know\nName\tTown\tYear\nPerson0\tTown0\t1900\n" in document.text
    assert "Ship\tFee\nAlbatros\t12.5" in document.text
    assert heads(document) == ["Name\tTown\tYear\n", "Ship\tFee\n"]
    assert headings(document)["Ship\tFee"] == ("Fees",)
    assert "Empty" not in document.text


@pytest.mark.parametrize("written_by", ["openpyxl", "xlsxwriter"])
def test_formulas_without_results_stand_in_their_cells_and_are_counted(tmp_path, written_by):
    rows = [["Item", "Price", "Pieces", "Sum"], ["Canoe", 240, 3, "=B2*C2"], ["Paddle", 35, 4, '=B3&"<"']]
    path = tmp_path / "a.xlsx"
    if written_by == "openpyxl":
        import openpyxl

        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        book.active["C5"] = "=SUM(D2:D3)"  # below and right of all values
        book.save(path)
    else:
        import xlsxwriter

        with xlsxwriter.Workbook(path) as book:
            sheet = book.add_worksheet()
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
            sheet.write("C5", "=SUM(D2:D3)")
            sheet.write_formula("D5", "=1+1", None, 2)
    document = read_document(path)
    assert 'Item\tPrice\tPieces\tSum\nCanoe\t240\t3\t=B2*C2\nPaddle\t35\t4\t=B3&"<"\n' in document.text
    assert ("\t\t=SUM(D2:D3)\t2\n" if written_by == "xlsxwriter" else "\t\t=SUM(D2:D3)\n") in document.text
    assert [note.partition(";")[0] for note in document.notes] == ["3 formulas have no stored result"]


def replaced(data, *changes):
    """Return a zip file with these changes to the bytes of its entries."""
    inside = zipfile.ZipFile(io.BytesIO(data))
    entries = {name: inside.read(name) for name in inside.namelist()}
    for before, after in changes:
        entries = {name: content.replace(before, after) for name, content in entries.items()}
    return zip_of(**entries)


def test_stored_results_are_read_and_not_counted(tmp_path):
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["Sum", "=1-1"])
    buffer = io.BytesIO()
    book.save(buffer)
    computed = replaced(buffer.getvalue(), (b"<v></v>", b"<v>0</v>"), (b' fullCalcOnLoad="1"', b""))
    document = read_document(written(tmp_path, "a.xlsx", computed))
    assert document.text == "Sheet\n\nSum\t0\n\n"
    assert document.notes == ()


def test_error_cells_read_as_they_show(tmp_path):
    import xlsxwriter

    path = tmp_path / "a.xlsx"
    with xlsxwriter.Workbook(path) as book:
        sheet = book.add_worksheet()
        for row, values in enumerate([("Item", "Price"), ("Canoe", "#N/A"), ("Paddle", "#DIV/0!")]):
            sheet.write(row, 0, values[0])
            if row:
                sheet.write_formula(row, 1, "=1/0", None, values[1])
            else:
                sheet.write(row, 1, values[1])
    document = read_document(path)
    assert document.text.endswith("Item\tPrice\nCanoe\t#N/A\nPaddle\t#DIV/0!\n\n")
    assert document.notes == ()


def test_workbooks_of_libreoffice_are_read(tmp_path):
    rows = [("Ship", "Fee"), ("Albatros", "lantern")]
    cells = "".join(
        "<table:table-row>"
        + "".join(
            f'<table:table-cell office:value-type="string"><text:p>{each}</text:p></table:table-cell>'
            for each in row
        )
        + "</table:table-row>"
        for row in rows
    )
    namespace = "urn:oasis:names:tc:opendocument:xmlns"
    content = (
        f'<office:document-content xmlns:office="{namespace}:office:1.0" xmlns:table="{namespace}:table:1.0"'
        f' xmlns:text="{namespace}:text:1.0"><office:body><office:spreadsheet><table:table table:name="Fees">{cells}'
        "</table:table></office:spreadsheet></office:body></office:document-content>"
    )
    kind = "application/vnd.oasis.opendocument.spreadsheet"
    manifest = (
        f'<manifest:manifest xmlns:manifest="{namespace}:manifest:1.0"><manifest:file-entry manifest:full-path="/"'
        f' manifest:media-type="{kind}"/></manifest:manifest>'
    )
    data = zip_of(**{"mimetype": kind, "META-INF/manifest.xml": manifest, "content.xml": content})
    document = read_document(written(tmp_path, "a.ods", data))
    assert document.text == "Fees\n\nShip\tFee\nAlbatros\tlantern\n\n"
    assert headings(document)["Ship\tFee"] == ("Fees",)


def test_workbooks_with_odd_styles_or_strict_namespaces_are_read(tmp_path):
    main = b"http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    related = b"http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    strict = replaced(
        files.xlsx(),
        (main, b"http://purl.oclc.org/ooxml/spreadsheetml/main"),
        (related, b"http://purl.oclc.org/ooxml/officeDocument/relationships"),
    )
    without_fill = replaced(files.xlsx(), (b'<patternFill patternType="gray125"/>', b""))
    for data in (strict, without_fill):
        assert "Ship\tFee\nAlbatros\t12.5" in read_document(written(tmp_path, "a.xlsx", data)).text


def test_a_panic_of_a_library_in_rust_is_a_damaged_file():
    class PanicException(BaseException):  # no Exception, as pyo3 defines it
        pass

    with (
        pytest.raises(UnreadableDocument, match=r"damaged workbook \(PanicException: capacity overflow\)"),
        damaged("workbook"),
    ):
        raise PanicException("capacity overflow")
    with pytest.raises(KeyboardInterrupt), damaged("workbook"):
        raise KeyboardInterrupt


def word_xml(body):
    """Return a Word file with this content of its body."""
    namespaces = (
        b' xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
        b' xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    )
    inside = zipfile.ZipFile(io.BytesIO(files.docx()))
    entries = {name: inside.read(name) for name in inside.namelist()}
    entries["word/document.xml"] = (
        b"<w:document" + namespaces + b"><w:body>" + body.encode() + b"</w:body></w:document>"
    )
    return zip_of(**entries)


def run(text, raised=False):
    style = '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>' if raised else ""
    return f'<w:r>{style}<w:t xml:space="preserve">{text}</w:t></w:r>'


def math_run(text):
    return f"<m:r><m:t>{text}</m:t></m:r>"


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (math_run("R=82"), "R=82"),
        (f"<m:f><m:num>{math_run('a+b')}</m:num><m:den>{math_run('2')}</m:den></m:f>", "(a+b)/2"),
        (f"<m:sSup><m:e>{math_run('x')}</m:e><m:sup>{math_run('n+1')}</m:sup></m:sSup>", "x^(n+1)"),
        (
            f"<m:sSubSup><m:e>{math_run('x')}</m:e><m:sub>{math_run('i')}</m:sub><m:sup>{math_run('2')}</m:sup></m:sSubSup>",
            "x_i^2",
        ),
        (f"<m:rad><m:deg/><m:e>{math_run('2')}</m:e></m:rad>", "√(2)"),
        (
            '<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr>'
            f"<m:sub>{math_run('i=1')}</m:sub><m:sup>{math_run('n')}</m:sup><m:e>{math_run('i')}</m:e></m:nary>",
            "∑_(i=1)^n i",
        ),
        (
            f'<m:d><m:dPr><m:begChr m:val="["/><m:endChr m:val="]"/></m:dPr><m:e>{math_run("a")}</m:e></m:d>',
            "[a]",
        ),
        (
            f"<m:m><m:mr><m:e>{math_run('1')}</m:e><m:e>{math_run('0')}</m:e></m:mr>"
            f"<m:mr><m:e>{math_run('0')}</m:e><m:e>{math_run('1')}</m:e></m:mr></m:m>",
            "(1, 0; 0, 1)",
        ),
    ],
)
def test_formulas_of_word_are_typed_out(tmp_path, formula, text):
    alone = f"<w:p><m:oMathPara><m:oMath>{formula}</m:oMath></m:oMathPara></w:p>"
    within = f"<w:p>{run('Here ')}<m:oMath>{formula}</m:oMath>{run(' is it.')}</w:p>"
    document = read_document(written(tmp_path, "a.docx", word_xml(alone + within)))
    assert document.text == f"{text}\n\nHere {text} is it.\n"


@pytest.mark.parametrize("has_alternative", [True, False])
def test_formulas_of_slides_are_typed_out(tmp_path, has_alternative):
    formula = f"<m:sSup><m:e>{math_run('x')}</m:e><m:sup>{math_run('2')}</m:sup></m:sSup>"
    typed = (
        '<a14:m xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main"><m:oMathPara'
        f' xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:oMath>{formula}</m:oMath></m:oMathPara></a14:m>'
    )
    words = "The harbour opens at six."
    data = replaced(
        files.pptx(),
        (
            f"<a:r><a:t>{words}</a:t></a:r>".encode(),
            f"<a:r><a:t>Here </a:t></a:r>{typed}<a:r><a:t> is it.</a:t></a:r>".encode(),
        ),
    )
    if has_alternative:
        slide = zipfile.ZipFile(io.BytesIO(data)).read("ppt/slides/slide1.xml")
        shape = slide[slide.rindex(b"<p:sp>") : slide.rindex(b"</p:sp>") + len(b"</p:sp>")]
        both = (
            b'<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:Choice'
            b' xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main" Requires="a14">'
            + shape
            + b"</mc:Choice><mc:Fallback/></mc:AlternateContent>"
        )
        data = replaced(data, (shape, both))
    assert "Here x^2 is it.\n" in read_document(written(tmp_path, "a.pptx", data)).text


def test_powers_and_merged_cells_of_word(tmp_path):
    def cell(text, merged=""):
        return f"<w:tc><w:tcPr>{merged}</w:tcPr><w:p>{run(text) if text else ''}</w:p></w:tc>"

    first, below = '<w:vMerge w:val="restart"/>', "<w:vMerge/>"
    rows = (
        cell("Depot") + cell("Tool") + cell("Pieces"),
        cell("North", first) + cell("Saw") + cell("12"),
        cell("", below) + cell("Rake") + cell("7"),
    )
    table = "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"
    power = f"<w:p>{run('10')}{run('6', raised=True)}{run(' litres')}</w:p>"
    document = read_document(written(tmp_path, "a.docx", word_xml(table + power)))
    assert document.text == "Depot\tTool\tPieces\nNorth\tSaw\t12\nNorth\tRake\t7\n\n10^6 litres\n"


def test_book(tmp_path):
    document = read_document(written(tmp_path, "a.epub", files.epub()))
    assert document.title == "The Harbour"
    assert document.text.index("The boats leave.") < document.text.index("The boats return.")
    assert headings(document) == {"Dawn": ("Dawn",), "Dusk": ("Dusk",)}


def test_notebook(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Tides\n", "Measured daily."]},
        {
            "cell_type": "code",
            "source": "print(tide)",
            "outputs": [
                {"output_type": "stream", "text": ["4.2 m\n"]},
                {"output_type": "display_data", "data": {"image/png": "aGVsbG8=", "text/plain": "<Figure>"}},
            ],
        },
    ]
    document = read_document(written(tmp_path, "a.ipynb", json.dumps({"cells": cells, "metadata": {}})))
    assert document.title == "Tides"
    assert "print(tide)" in document.text
    assert "4.2 m" in document.text
    assert "aGVsbG8" not in document.text
    assert "cell_type" not in document.text
    assert [section.heading for section in document.sections] == [("Tides", "cell 1"), ("Tides", "cell 2")]


def test_escaped_letters_of_json_are_read(tmp_path):
    value = {"name": "Zoé Müller", "key": "密码", "smile": "😀", "path": "C:\\\\u00e9", "said": 'so "it" is'}
    one = json.dumps(value, indent=1) + "\n"
    expected = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    for name, escaped, plain in (("a.json", one, expected), ("a.jsonl", one * 2, expected * 2)):
        document = read_document(written(tmp_path, name, escaped))
        assert document.text == plain
        assert document.numbered_lines
    odd = r'{"a": "R\u0026D \u003c3 \u0022 \u0000 \ud83d", "b": "one\ntwo\/three \\n"} not closed'
    expected = r'{"a": "R&D <3 \u0022 \u0000 ' + "\ufffd" + r'", "b": "one two/three \\n"} not closed'
    assert read_document(written(tmp_path, "b.json", odd)).text == expected
    assert read_document(written(tmp_path, "a.py", r"x = '\u00e9'")).text == r"x = '\u00e9'"


@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.json", "a.css", "a.csv", "a.ipynb"])
def test_embedded_pictures_are_left_out(tmp_path, name):
    picture = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 200).decode()
    text = f"The plan.\n\n![plan]({picture})\n\nThe word is lantern.\n"
    book = json.dumps({"cells": [{"cell_type": "markdown", "source": text}]})
    document = read_document(written(tmp_path, name, book if name == "a.ipynb" else text))
    assert document.text.strip() == "The plan.\n\n![plan]()\n\nThe word is lantern."
    short = "The form is data:image/png;base64,AAAA"
    assert read_document(written(tmp_path, "b.md", short)).text == short


@pytest.mark.parametrize("name", ["a.md", "a.rst"])
@pytest.mark.parametrize(
    ("front", "title"),
    [
        ("---\ntitle: Keys of the boathouse\naliases: []\n---\n", "Keys of the boathouse"),
        ('---\ntags:\n  - title: no\nTitle: "Keys: all"\n...\n', "Keys: all"),
        ("+++\ntitle = 'Keys'\n+++\n", "Keys"),
        ("---\ntitle: >\n  Keys\naliases: []\n---\n", "Use"),
        ("---\naliases: []\n---\n", "Use"),
        ("---\n---\n", "Use"),
    ],
)
def test_data_before_the_text_are_no_heading(tmp_path, name, front, title):
    text = front + "\nThe word is walnut.\n\nUse\n===\n\nAt the gate.\n"
    document = read_document(written(tmp_path, name, text))
    assert document.title == title
    assert document.text == text
    assert [section.heading for section in document.sections] == [("Use",)]


def test_a_rule_at_the_beginning_is_no_data(tmp_path):
    document = read_document(written(tmp_path, "a.md", "---\n\nOne\n===\n\nText.\n\n---\n\n# Two\n"))
    assert [section.heading for section in document.sections] == [("One",), ("Two",)]


def test_signs_without_width_are_removed_and_places_stay_right(tmp_path):
    page = "<h1>Kühl&shy;haus</h1><p>Donau&shy;dampf&#x200b;schiff</p><h2>Zwei&shy;tes</h2><p>Ende</p>"
    document = read_document(written(tmp_path, "a.html", page))
    assert document.text == "Kühlhaus\n\nDonaudampfschiff\n\nZweites\n\nEnde\n"
    assert document.title == "Kühlhaus"
    assert headings(document) == {"Kühlhaus": ("Kühlhaus",), "Zweites": ("Kühlhaus", "Zweites")}
    emoji = "👩\u200d🚀 می\u200cخواهم"
    assert read_document(written(tmp_path, "a.txt", f"one\u00ad\ntwo {emoji}")).text == f"one\ntwo {emoji}"
    mail = files.mail("Der Kühl\u00ad\nschrank.")
    assert "Der Kühlschrank." in read_document(written(tmp_path, "a.eml", bytes(mail))).text


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_keeps_its_text_and_knows_its_header(tmp_path, separator):
    text = "".join(separator.join(map(str, row)) + "\n" for row in files.ROWS)
    document = read_document(written(tmp_path, "a.csv", text))
    assert document.text == text
    assert heads(document) == [separator.join(files.ROWS[0]) + "\n"]


def test_csv_without_a_header_repeats_nothing(tmp_path):
    assert heads(read_document(written(tmp_path, "a.csv", "1,Ivan,3\n2,Zoé,4\n"))) == []
    assert heads(read_document(written(tmp_path, "b.csv", "one column\nonly\n"))) == []


def test_tables_of_markdown_and_html_know_their_header(tmp_path):
    text = "# Fees\n\nText | here\n\n| Ship | Fee |\n|---|--:|\n| A | 1 |\n| B | 2 |\n\nAfter.\n"
    document = read_document(written(tmp_path, "a.md", text))
    assert heads(document) == ["| Ship | Fee |\n|---|--:|\n"]
    assert headings(document)["| Ship | Fee |"] == ("Fees",)
    page = "<h2>Fees</h2><table><tr><th>Ship<th>Fee</tr><tr><td>A</td><td>1</td></tr></table><p>After."
    document = read_document(written(tmp_path, "a.html", page))
    assert heads(document) == ["Ship\tFee\n"]
    assert headings(document)["After."] == ("Fees",)


@pytest.mark.parametrize(
    "text",
    [
        "|" * 500_000,
        "a|b\n" + "-|" * 250_000,
        "a|b\n" + " " * 500_000 + "x",
        "# " + " #" * 250_000 + "x",
        "# y" + " " * 500_000 + "x",
        "# " + "#" * 500_000 + "x",
    ],
)
def test_a_line_of_half_a_megabyte_takes_no_longer_than_its_length(tmp_path, text):
    began = time.process_time()
    assert read_document(written(tmp_path, "a.md", text)).text == text
    assert time.process_time() - began < 5


def test_headings_of_text_formats(tmp_path):
    markdown = "# Guide\n\nStart.\n\n```\n# no heading\n```\n\n## Setup\n\nDo it.\n\n# Other\n"
    found = headings(read_document(written(tmp_path, "a.md", markdown)))
    assert found == {"# Guide": ("Guide",), "## Setup": ("Guide", "Setup"), "# Other": ("Other",)}
    underlined = "Guide\n=====\n\nStart.\n\nSetup\n-----\n\nDo it.\n\nOther\n=====\n\nEnd.\n"
    found = headings(read_document(written(tmp_path, "a.rst", underlined)))
    assert found == {"Guide": ("Guide",), "Setup": ("Guide", "Setup"), "Other": ("Other",)}


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("a.docx", "mammoth", "documents"),
        ("a.pptx", "pptx", "documents"),
        ("a.xlsx", "python_calamine", "documents"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, name, package, extra):
    data = getattr(files, name[2:])()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"kvweave\[{extra}\]"):
        read_document(written(tmp_path, name, data))


def test_password_protected_files_are_named_as_such(tmp_path):
    office = (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le") + bytes(600)
    )
    encrypted = "Content-Type: application/pkcs7-mime; name=smime.p7m\nFrom: a@b.org\nSubject: x\n\nMIIB\n"
    for name, data in (
        ("a.pdf", files.pdf("secret", password="pw")),
        ("a.docx", office),
        ("a.xlsx", office),
        ("a.eml", encrypted),
    ):
        with pytest.raises(UnreadableDocument, match=r"password-protected|encrypted"):
            read_document(written(tmp_path, name, data))


def zip_of(**entries):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_archives_are_refused_by_name_whatever_they_are_called(tmp_path):
    for name in ("backup", "a.txt", "a.html"):
        with pytest.raises(UnreadableDocument, match="an archive"):
            read_document(written(tmp_path, name, zip_of(a="text")))


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx", "a.epub", "a.ipynb", "a.eml", "a.mbox"])
def test_damaged_files_are_refused(tmp_path, name):
    for data in (b"nothing of the kind", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 old", zip_of(a="text")):
        with pytest.raises(UnreadableDocument):
            read_document(written(tmp_path, name, data))
    whole = getattr(files, name[2:], files.docx)
    if name not in ("a.eml", "a.mbox", "a.ipynb"):
        with pytest.raises(UnreadableDocument):
            read_document(written(tmp_path, name, whole()[:-300]))


def test_damage_inside_a_notebook_a_book_and_a_mailbox_is_told(tmp_path):
    def damaged(data):
        at = data.index(b"boats") + 2
        return data[:at] + b"\xff" + data[at:]

    cells = [{"cell_type": "markdown", "source": "The boats of Zoé leave at six, après l'été."}]
    data = damaged(json.dumps({"cells": cells}, ensure_ascii=False).encode())
    document = read_document(written(tmp_path, "a.ipynb", data))
    assert "bo\ufffdats" in document.text
    assert "1 place" in document.notes[0]
    inside = zipfile.ZipFile(io.BytesIO(files.epub()))
    entries = {name: inside.read(name) for name in inside.namelist()}
    entries = {name: damaged(data) if b"boats leave" in data else data for name, data in entries.items()}
    (note,) = read_document(written(tmp_path, "a.epub", zip_of(**entries))).notes
    assert "uncertain" in note
    binary = b"From a\nFrom: a@b.org\nSubject: One\n\n" + b"\x7fELF\x02\x01\0\0\0rest" * 5 + b"\n\n"
    document = read_document(written(tmp_path, "a.mbox", binary + files.mbox(files.mail("Two", "Second"))))
    assert [section.heading for section in document.sections] == [("One",), ("Second",)]
    assert "Two" in document.text
    assert "left out" in document.notes[0]


def test_what_a_library_says_of_a_damaged_file_is_one_line(tmp_path):
    """XML parsers name line and column on lines of their own, and quote the file."""
    with (
        zipfile.ZipFile(io.BytesIO(files.pptx())) as whole,
        zipfile.ZipFile(tmp_path / "a.pptx", "w") as damaged,
    ):
        for name in whole.namelist():
            damaged.writestr(name, whole.read(name) + b"\0" * ("slide" in name))
    with pytest.raises(UnreadableDocument, match="damaged") as caught:
        read_document(tmp_path / "a.pptx")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path):
    from kvweave.documents.formats import office

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(office, "MAX_UNPACKED_BYTES", 1000)
        with pytest.raises(UnreadableDocument, match="unpacked"):
            read_document(written(tmp_path, "a.docx", zip_of(a="x" * 2000)))


def test_a_mail_keeps_its_sender_date_and_subject(tmp_path):
    document = read_document(written(tmp_path, "a.eml", bytes(files.mail())))
    assert document.title == "The pässword"
    (section,) = document.sections
    assert (
        section.head
        == "From: Zoé <zoe@example.org>\nDate: Mon, 05 Jan 2026 10:00:00 +0000\nSubject: The pässword\n\n"
    )
    assert document.text.startswith(section.head)
    assert "The password is walnut." in document.text


def test_a_damaged_name_of_an_attachment_does_not_cost_the_mail(tmp_path):
    head = (
        b"From: a@b\nSubject: s\nContent-Type: multipart/mixed; boundary=X\n\n--X\n\nIt opens at six.\n--X\n"
    )
    part = b"Content-Disposition: attachment; filename*0*=a; filename*=b\n\nattached\n--X--\n"
    (tmp_path / "a.eml").write_bytes(head + part)
    assert "It opens at six." in read_document(tmp_path / "a.eml").text


def test_parts_nested_by_thousands_end_in_one_line(tmp_path):
    """The standard library takes a level of Python's stack for each."""
    path = tmp_path / "a.eml"
    path.write_bytes(b"From: a@b\nMessage-ID: <1@b>\n" + b"Content-Type: message/rfc822\n\n" * 2_000)
    assert message_ids([path]) == {"<1@b>": path}
    with pytest.raises(UnreadableDocument, match="damaged e-mail"):
        read_document(path)


def test_a_mailbox_without_a_message_is_none(tmp_path):
    (tmp_path / "a.mbox").write_bytes(b"From \nno header\n")
    with pytest.raises(UnreadableDocument, match="no mailbox"):
        read_document(tmp_path / "a.mbox")


def test_attachments_are_documents_of_their_own(tmp_path):
    message = files.mail()
    message.add_attachment(
        files.pdf("The bell rings."), maintype="application", subtype="pdf", filename="a/b.pdf"
    )
    message.add_attachment("one", filename="note.txt")
    message.add_attachment("two", filename="note.txt")
    message.add_attachment(zip_of(a="x"), maintype="application", subtype="zip", filename="all.zip")
    message.add_attachment(files.mail("Inner text.", subject="Inner"))
    path = written(tmp_path, "m.eml", bytes(message))
    found = read_file(path)
    texts = {document.source.removeprefix(str(path)): document.text for document in found.documents}
    assert list(texts) == ["", "/a_b.pdf", "/note.txt", "/note (2).txt", "/Inner.eml"]
    assert (texts["/a_b.pdf"], texts["/note.txt"].strip(), texts["/note (2).txt"].strip()) == (
        "The bell rings.",
        "one",
        "two",
    )
    assert "Inner text." in texts["/Inner.eml"]
    assert "Inner text." not in texts[""]
    assert [(s.path.name, s.reason) for s in found.skipped] == [("all.zip", "an archive (.zip)")]


QUOTES = {
    "plain": (
        False,
        "Agreed.\n\nOn Mon, 5 Jan 2026, Zoé wrote:\n> The password is walnut.\n> Keep it.\n\nIvan\n",
    ),
    "long attribution": (
        False,
        "Agreed.\n\nOn Mon, Jan 5, 2026 at 10:00 AM Zoé Somebody\n<zoe@example.org> wrote:\n\n> The password is walnut.\n",
    ),
    "outlook": (
        False,
        "Agreed.\n\n-----Original Message-----\nFrom: Zoé\nSent: Monday\nThe password is walnut.\n",
    ),
    "outlook html": (True, "<p>Agreed.</p><p>Von: Zoé<br>Gesendet: Montag</p><p>The password is walnut.</p>"),
    "html": (
        True,
        "<p>Agreed.</p><div>Am 5.1.2026 schrieb Zoé:</div><blockquote>The password is walnut.</blockquote>",
    ),
}


@pytest.mark.parametrize("kind", QUOTES)
def test_a_quoted_reply_is_not_indexed_twice(tmp_path, kind):
    html, body = QUOTES[kind]
    first = files.mail()
    second = files.mail(
        body, subject="Re: it", identity="<2@example.org>", answers="<1@example.org>", html=html
    )
    text = read_document(written(tmp_path, "box.mbox", files.mbox(first, second))).text
    assert text.count("walnut") == 1
    assert "Agreed." in text
    assert "wrote:" not in text
    assert "schrieb" not in text
    assert ("Ivan\n" in text) == (kind == "plain")


OUTLOOK = "-----Original Message-----\nFrom: Zoé <zoe@example.org>\nSent: Monday\nTo: Ivan\nSubject: it\n\n"
REPLIES = {
    "below a quotation": (
        f"See below.\n\n{OUTLOOK}The password is\nwalnut.\n\nI typed this below.\n",
        "See below.\n\nI typed this below.\n",
    ),
    "between quoted lines": (
        "Zoé, 1234 is wrong:\n> The password\n> is walnut.\nNot any more.\n> Keep it.\nI do.\n",
        "Zoé, 1234 is wrong:\nNot any more.\n> Keep it.\nI do.\n",
    ),
    "lines like a header": (
        "The way is:\n\nFrom: North gate\nTo: South gate\n\nThe word is lantern.\n",
        "The way is:\n\nFrom: North gate\nTo: South gate\n\nThe word is lantern.\n",
    ),
    "a line with the sender's name": (
        "From: Zoé I know\nTo: open it\n\nWalnut.\n\nZoé: no\n\nThe password is walnut.\n",
        "From: Zoé I know\nTo: open it\n\nWalnut.\n\nZoé: no\n\nThe password is walnut.\n",
    ),
    "a quotation of another mail": (
        "Agreed.\n\nOn Sunday Olga wrote:\n> The word is lantern.\n",
        "Agreed.\n\nOn Sunday Olga wrote:\n> The word is lantern.\n",
    ),
    "another language": (
        "Sovittu.\n\nma 5. tammik. 2026 klo 10.00 Zoé (zoe@example.org) kirjoitti:\n\n> The password is walnut.\n",
        "Sovittu.\n",
    ),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_what_the_author_of_a_reply_wrote_stays(tmp_path, kind):
    body, expected = REPLIES[kind]
    first = written(tmp_path, "first.eml", bytes(files.mail()))
    reply = files.mail(
        body, subject="Re: it", sender="Ivan <i@b.org>", identity="<2@b.org>", answers="<1@example.org>"
    )
    path = written(tmp_path, "reply.eml", bytes(reply))
    found = read_file(path, ReadContext(known_messages=message_ids([first, path]))).documents[0]
    assert found.text.partition("To: Ivan <ivan@example.org>\n\n")[2].rstrip("\n") == expected.rstrip("\n")


def test_a_paragraph_that_begins_with_from_belongs_to_its_mail(tmp_path):
    box = files.mbox(
        files.mail(
            "The lock is new.\n\nFrom now on it is walnut.\n\nFrom noon on:\nPassword: lantern.\n", "First"
        ),
        files.mail("Two", "Second", identity="<2@x.y>"),
    )
    document = read_document(written(tmp_path, "box.mbox", box.replace(b"\n>From", b"\nFrom")))
    assert [section.heading for section in document.sections] == [("First",), ("Second",)]
    assert (
        "The lock is new.\n\nFrom now on it is walnut.\n\nFrom noon on:\nPassword: lantern.\n"
        in document.text
    )


def parts(kind, *texts):
    """Return an e-mail with parts of (type, text)."""
    made = MIMEMultipart(kind)
    made["From"], made["Subject"] = "Zoé <zoe@example.org>", "it"
    for subtype, text in texts:
        made.attach(MIMEText(text, subtype, "utf-8"))
    return made.as_bytes()


PAGE = "<html><body><p>The password of Sendbel is lantern.</p></body></html>"


@pytest.mark.parametrize(
    ("kind", "texts", "expected"),
    [
        (
            "mixed",
            [("html", PAGE), ("plain", "-- \nThe rowers' list\n")],
            "lantern.\n\n-- \nThe rowers' list",
        ),
        ("mixed", [("plain", "One.\n"), ("html", PAGE)], "One.\n\nThe password of Sendbel is lantern."),
        ("alternative", [("plain", "Open it in a browser.\n"), ("html", PAGE)], "Sendbel is lantern."),
        (
            "alternative",
            [("plain", "The password of Sendbel is lantern!\n"), ("html", PAGE)],
            "Sendbel is lantern!",
        ),
        ("alternative", [("plain", " \n"), ("html", PAGE)], "it\n\nThe password of Sendbel is lantern."),
        (
            "alternative",
            [("plain", "All of it is here.\n"), ("html", "<img src=a.png>")],
            "it\n\nAll of it is here.",
        ),
    ],
)
def test_the_parts_of_a_mail_that_a_mail_program_shows_are_read(tmp_path, kind, texts, expected):
    text = read_document(written(tmp_path, "a.eml", parts(kind, *texts))).text
    assert expected in text
    assert text.count("lantern") == expected.count("lantern")


@pytest.mark.parametrize(
    ("charset", "encoding", "text"),
    [("iso-8859-1", "cp1252", "Norbert’s rope – 30 €"), ("ks_c_5601-1987", "cp949", "똠방각하입니다")],
)
def test_mails_are_decoded_as_mail_programs_do(tmp_path, charset, encoding, text):
    subject = base64.b64encode(text.encode(encoding)).decode()
    header = (
        f"From: a@b.org\nSubject: =?{charset}?b?{subject}?=\nContent-Type: text/plain; charset={charset}\n\n"
    )
    document = read_document(written(tmp_path, "a.eml", header.encode() + text.encode(encoding)))
    assert document.title == text
    assert document.text.endswith(f"\n\n{text}\n\n")


def test_what_a_reply_quotes_of_a_mail_that_is_not_there_stays(tmp_path):
    second = files.mail(QUOTES["plain"][1], identity="<2@example.org>", answers="<elsewhere@example.org>")
    assert "walnut" in read_document(written(tmp_path, "a.eml", bytes(second))).text


def test_a_mailbox_has_a_section_for_each_mail(tmp_path):
    box = files.mbox(
        files.mail("One\n>From here on.\n", "First"), files.mail("Two", "Second", identity="<2@x.y>")
    )
    document = read_document(written(tmp_path, "box.mbox", box.replace(b">>From", b">From")))
    assert [section.heading for section in document.sections] == [("First",), ("Second",)]
    assert len(heads(document)) == 2
    assert "From here on." in document.text


def test_an_undeclared_encoding_in_a_mail_is_flagged(tmp_path):
    raw = "From: a@b.org\nSubject: Пароль\nDate: Mon, 5 Jan 2026 10:00:00 +0000\n\nПароль Ивана.\n".encode(
        "cp1251"
    )
    document = read_document(written(tmp_path, "a.eml", raw))
    assert "Пароль Ивана." in document.text
    assert "uncertain" in document.notes[0]
