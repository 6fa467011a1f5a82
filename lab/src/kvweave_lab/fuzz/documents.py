"""Hostile documents: text in any encoding, HTML, e-mails, PDF and office files."""

import base64
import gzip
import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from kvweave.documents.formats.mail import message_ids
from kvweave.documents.readers import read_file
from kvweave.errors import DocumentError, MissingExtra
from kvweave_lab.fuzz.campaign import Files, Reader
from kvweave_lab.fuzz.mutations import OUTSIDE, mutated, mutated_zip

_REFUSES: Final = (DocumentError, MissingExtra, MemoryError)
"""A reader's process turns MemoryError into UnreadableDocument (`documents.reader_process`)."""


def _read(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix == ".eml":
            message_ids([path])
        read_file(path)


def _reader(make: Callable[[Random], tuple[str, bytes]], *, own_process: bool = False) -> Reader:
    def files(rng: Random) -> Files:
        name, data = make(rng)
        return {name: data}

    return Reader(files, _read, _REFUSES, own_process)


# Text

_TEXTS: Final = tuple(
    text.encode(encoding)
    for text, encodings in (
        (
            "Title\n=====\n\nThe harbour opens at six; “ships” wait – outside.\n",
            ("utf-8", "cp1252", "utf-16"),
        ),
        (
            "Гавань открывается в шесть часов утра, корабли ждут.\n" * 3,
            ("utf-8", "koi8-r", "cp1251", "utf-16-le"),
        ),
        (
            "港は六時に開きます。船は外で待ちます。\n" * 3,
            ("utf-8", "shift_jis", "euc_jp", "iso2022_jp", "utf-32"),
        ),
        (
            "---\ntitle: A\n---\n# One\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\ncode\n```\n## Two\n",
            ("utf-8",),
        ),
        ("name,age\nAnn,33\nBen,41\n", ("utf-8", "utf-16-be")),
        ('{"a": ["\\u00e9", {"b": null}], "c": "data:image/png;base64,' + "QUJD" * 20 + '"}\n', ("utf-8",)),
        (
            '{"cells": [{"cell_type": "code", "source": ["x = 1"], "outputs": [{"text": "1"}]}], "metadata": {}}',
            ("utf-8",),
        ),
    )
    for encoding in encodings
)
_TEXT_WORDS: Final = (
    *(
        b"\xff\xfe",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\x1b$B",
        b"\0",
        b"charset=utf-7",
        b"encoding=idna",
        b"coding: hex",
    ),
    *(
        b"coding: unicode_escape",
        b"charset=rot13",
        b"charset=undefined",
        b"|",
        b"---\n",
        b"\n\n",
        b"# ",
        b"```\n",
    ),
    *(
        b"\\ud800",
        b"\\u0000",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc2\xad",
        b"\r",
        b"data:a/b;base64,",
    ),
    *(b"[", b"{", b'"', b",", b"\t", b"\x0c", b"\xe2\x80\x8b", b"=" * 80 + b"\n", b"title:", b"\x1a"),
)
_SUFFIXES: Final = (
    *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".ipynb", ".py", "", ".log", ".xml", ".yaml"),
    *(".txt.gz", ".geojson", ".mkd"),
)


def _text(rng: Random) -> tuple[str, bytes]:
    suffix = rng.choice(_SUFFIXES)
    data = rng.choice(_TEXTS)
    if rng.random() < 0.02:
        data = rng.choice((b"|", b"[", b"\n", b"# a\n", b"a" * 9 + b"\xff", b"\\u00e9", b" ")) * 400_000
    else:
        data = mutated(rng, data, _TEXT_WORDS, _TEXTS)
    if suffix.endswith(".gz"):
        data = gzip.compress(data, 1, mtime=0)
        if rng.random() < 0.3:
            data = mutated(rng, data)
        elif rng.random() < 0.005:
            data = gzip.compress(b"\0" * (100 << 20), 9, mtime=0)
    return f"notes{suffix}", data


# HTML

_PAGE: Final = (
    b"<!DOCTYPE html><html><head><meta charset=utf-8><title>Port</title><style>p{}</style></head><body><h1>Harbour</h1>"
    b"<p>It opens at <b>six</b>.<br>Ships <s>wait</s> m<sup>2</sup> H<sub>2</sub>O.</p><table><thead><tr><th>a<th colspan=2>b"
    b"</thead><tr><td rowspan=3>1<td>2<td>3<tr><td>4</table><ul><li>one<li>two</ul><pre>x\n  y</pre><blockquote>said</blockquote>"
    b"<math><mfrac><mi>a</mi><msqrt><mn>2</mn></msqrt></mfrac></math><div hidden>no</div><noscript>shown</noscript></body></html>"
)
_XHTML: Final = b'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/></head><body><p/>text</body></html>'
_TAGS: Final = tuple(
    f"<{end}{tag}>".encode()
    for tag in (
        *(
            "div",
            "table",
            "tr",
            "td",
            "th",
            "thead",
            "tbody",
            "blockquote",
            "h1",
            "h6",
            "pre",
            "p",
            "li",
            "ul",
            "b",
            "a",
        ),
        *(
            "math",
            "mfrac",
            "msup",
            "mrow",
            "mtable",
            "sup",
            "sub",
            "template",
            "svg",
            "select",
            "option",
            "frameset",
            "html",
        ),
        *(
            "noscript",
            "textarea",
            "title",
            "body",
            "form",
            "i",
            "font",
            "s",
            "dd",
            "ruby",
            "script",
            "plaintext",
            "caption",
        ),
    )
    for end in ("", "/")
)
_HTML_WORDS: Final = (
    *_TAGS,
    *(
        b"<td rowspan=0>",
        b"<td rowspan=65534 colspan=1000>",
        b"<td colspan=99999999999999999999>",
        b"<td rowspan=-1>",
    ),
    *(
        b"<!--",
        b"-->",
        b"<![CDATA[",
        b"]]>",
        b"&#0;",
        b"&#xD800;",
        b"&#x10FFFF;",
        b"&lt",
        b"&" + b"a" * 50,
        b"<",
        b"<a ",
    ),
    *(
        b"<p style='display:none'>",
        b"<p hidden=until-found>",
        b"<meta charset=utf-7>",
        b"<base href=file:///etc/passwd>",
    ),
    *(
        b"<iframe src=/etc/passwd>",
        b"<?xml encoding='utf-16'?>",
        b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]>&b;",
    ),
)


def _html(rng: Random) -> tuple[str, bytes]:
    data = rng.choice((_PAGE, _PAGE, _XHTML))
    if rng.random() < 0.05:
        words = [rng.choice(_HTML_WORDS) for _ in range(rng.choice((1, 2, 3)))]
        data = b"".join(words) * rng.choice((100, 3_000, 20_000)) + b"x"
    else:
        data = mutated(rng, data, _HTML_WORDS, (_PAGE, _XHTML))
    return f"page{rng.choice(('.html', '.htm', '.xhtml'))}", data


# E-mail

_MAIL: Final = (
    b"From: Ann <ann@example.org>\r\nTo: Ben <ben@example.org>\r\nDate: Mon, 3 Feb 2025 10:00:00 +0100\r\nMessage-ID: <1@a>\r\n"
    b"In-Reply-To: <0@a>\r\nSubject: =?utf-8?q?H=C3=A9?= harbour\r\nMIME-Version: 1.0\r\n"
    b"Content-Type: multipart/mixed; boundary=XX\r\n\r\n--XX\r\nContent-Type: multipart/alternative; boundary=YY\r\n\r\n--YY\r\n"
    b"Content-Type: text/plain; charset=iso-8859-1\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\nIt opens =E0 six.\r\n> old\r\n"
    b"--YY\r\nContent-Type: text/html; charset=utf-8\r\nContent-Transfer-Encoding: base64\r\n\r\n"
    + base64.b64encode(b"<p>It opens at six.</p><blockquote>old</blockquote>")
    + b"\r\n--YY--\r\n--XX\r\nContent-Type: application/octet-stream; name=notes.txt\r\n"
    b"Content-Disposition: attachment; filename*=utf-8''notes.txt\r\n\r\nattached text\r\n--XX\r\nContent-Type: message/rfc822\r\n\r\n"
    b"From: Cid <c@example.org>\r\nSubject: inner\r\n\r\ninner text\r\n--XX--\r\n"
)
_MAIL_WORDS: Final = (
    *(
        b"--XX\r\n",
        b"--YY\r\n",
        b"Content-Type: multipart/mixed; boundary=XX\r\n\r\n--XX\r\n",
        b"Content-Type: message/rfc822\r\n\r\n",
    ),
    *(
        b"charset=utf-7",
        b"charset=idna",
        b"charset=hex",
        b"=?utf-8?b?//8=?=",
        b"=?x?q?a?=",
        b"Content-Transfer-Encoding: uu\r\n",
    ),
    *(
        b"filename=../../etc/passwd",
        b"filename=/etc/passwd",
        b"filename*=utf-16''%00%d8",
        b"filename*0*=a;filename*1=b",
    ),
    *(
        b"\nFrom a@b Mon Feb  3 10:00:00 2025\n",
        b">From ",
        b"\r\n\r\n",
        b"References: " + b"<1@a> " * 50,
        b";",
        b"(",
        b'"',
        b"\x80",
    ),
    *(
        b"filename=a.html",
        b"filename=a.pdf",
        b"filename=a.docx",
        b"filename=a.eml",
        b"Content-Type: multipart/encrypted\r\n",
    ),
)


def _mail(rng: Random) -> tuple[str, bytes]:
    if rng.random() < 0.5:
        return "letter.eml", mutated(rng, _MAIL, _MAIL_WORDS, (_PAGE, *_TEXTS))
    box = (b"From ann Mon Feb  3 10:00:00 2025\n" + _MAIL.replace(b"\r\n", b"\n") + b"\n") * rng.randrange(
        1, 4
    )
    return "letters.mbox", mutated(rng, box, _MAIL_WORDS, (_MAIL,))


# PDF


def _pdf_of(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a PDF of these objects, of which the first is the catalogue."""
    body, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % at for at in places)
    return (
        body
        + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R %s>>\nstartxref\n%d\n%%%%EOF\n"
        % (
            len(objects) + 1,
            table,
            len(objects) + 1,
            trailer,
            len(body),
        )
    )


def _stream(data: bytes, more: bytes = b"", *, packed: bool = False) -> bytes:
    data, kind = (zlib.compress(data), b"/Filter /FlateDecode ") if packed else (data, b"")
    return b"<< /Length %d %s%s>>\nstream\n%s\nendstream" % (len(data), kind, more, data)


_CONTENT: Final = b"BT /F1 12 Tf 72 700 Td (The harbour opens at six.) Tj T* [(Ships) -250 (wait)] TJ ET"
_FONT: Final = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >>"
_CMAP: Final = b"begincmap 1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfrange <41> <5A> <0041> endbfrange endcmap"


def _objects(content: bytes = _CONTENT, *, packed: bool = False) -> list[bytes]:
    return [
        b"<< /Type /Catalog /Pages 2 0 R /Outlines 7 0 R /AcroForm << /Fields [9 0 R] >> >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Annots [9 0 R] "
        b"/Resources << /Font << /F1 5 0 R >> /XObject << /X 10 0 R >> >> >>",
        _stream(content, packed=packed),
        _FONT,
        _stream(_CMAP),
        b"<< /Type /Outlines /First 8 0 R /Last 8 0 R /Count 1 >>",
        b"<< /Title (Harbour) /Parent 7 0 R /Dest [3 0 R /Fit] >>",
        b"<< /Subtype /Widget /FT /Tx /T (name) /V (Ann) /Rect [0 0 9 9] /P 3 0 R >>",
        _stream(b"BT (inside) Tj ET", b"/Subtype /Form /Resources << /XObject << /X 10 0 R >> >> "),
    ]


_PDFS: Final = (_pdf_of(_objects()), _pdf_of(_objects(packed=True)), _pdf_of(_objects(_CONTENT + b" /X Do")))
_PDF_WORDS: Final = (
    *(
        b"1 0 R",
        b"3 0 R",
        b"10 0 R",
        b"99 0 R",
        b"<<",
        b">>",
        b"[",
        b"]",
        b"(",
        b")",
        b"/Kids [2 0 R]",
        b"/Parent 3 0 R",
    ),
    *(
        b"/Next 8 0 R",
        b"/First 7 0 R",
        b"/Prev 0",
        b"/Prev 9999999999",
        b"/Length 999999999999",
        b"/Length -1",
        b"/X Do",
    ),
    *(
        b"/Filter /LZWDecode",
        b"/Filter [/FlateDecode /FlateDecode]",
        b"/Filter /ASCII85Decode",
        b"/Filter /JBIG2Decode",
    ),
    *(
        b"/Filter /RunLengthDecode",
        b"/Predictor 15 /Columns 99999999",
        b"/Type /ObjStm /N 99999999 /First 9",
        b"stream\n",
    ),
    *(
        b"/Type /XRef /W [8 8 8] /Index [0 99999999]",
        b"/Encrypt << /Filter /Standard /V 5 /R 6 >>",
        b"endobj\n",
        b"/XFA 4 0 R",
    ),
    *(
        b"/Count 2147483647",
        b"begincidrange <0000> <FFFFFFFF> 1",
        b"beginbfrange <0000> <FFFFFFFF> <0041>",
        b"BI /W 9 ID ",
        b" q ",
    ),
    *(
        b"/EmbeddedFiles",
        b"/F (../../etc/passwd)",
        b"/FFilter /FlateDecode",
        b"/URI (file:///etc/passwd)",
        b"\0",
        b"%",
        b" Tj ",
    ),
)


def _pdf_bomb(rng: Random) -> bytes:
    """Return a PDF that is small and means something large."""
    nested = rng.choice((b"[", b"<< /A ", b"(", b"<< /Kids [")) * rng.choice((500, 20_000))
    huge = zlib.compress(rng.choice((b"\0", b"BT (a) Tj ET ", b"q ", b"[")) * (8 << 20), 9)
    twice = zlib.compress(huge, 9)
    objects = _objects()
    at = rng.randrange(1, len(objects))
    objects[at] = rng.choice(
        (
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(huge), huge),
            b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%s\nendstream"
            % (len(twice), twice),
            b"<< /Type /Pages /Kids [" + b"3 0 R " * rng.choice((1_000, 20_000)) + b"] /Count 20000 >>",
            b"<< /Type /Pages /Kids [2 0 R 3 0 R 2 0 R] /Count 3 >>",
            _stream(b"1 0 2 9 3 99 " + b"<< >> " * 1_000, b"/Type /ObjStm /N 100000000 /First 12 "),
            _stream(b"\x01\0\0\0" * 100, b"/Type /XRef /W [1 2 1] /Size 100000000 /Index [0 100000000] "),
            _stream(b"begincmap 1 beginbfrange <0000> <FFFF> <0041> endbfrange " * 50),
            _stream(b"begincmap 1 beginbfrange <00000000> <FFFFFFFF> <0041> endbfrange"),
            b"<< /Title (a) /Parent 7 0 R /Next 8 0 R /First 8 0 R /Dest [3 0 R /Fit] >>",
            _stream(b"BT " + b"(a) Tj T* " * 100_000 + b"ET"),
            nested,
        )
    )
    return _pdf_of(objects)


def _pdf(rng: Random) -> tuple[str, bytes]:
    if rng.random() < 0.02:
        return "paper.pdf", _pdf_bomb(rng)
    return "paper.pdf", mutated(rng, rng.choice(_PDFS), _PDF_WORDS, _PDFS)


# Office files and books

_RELATIONS: Final = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE: Final = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_WORD: Final = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_SHEET: Final = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_CORE: Final = b'<cp:coreProperties xmlns:cp="c" xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Port</dc:title></cp:coreProperties>'


def _related(*targets: tuple[str, str]) -> bytes:
    rows = "".join(
        f'<Relationship Id="r{n}" Type="{_OFFICE}/{kind}" Target="{target}"/>'
        for n, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{_RELATIONS}">{rows}</Relationships>'.encode()


def _types(**parts: str) -> bytes:
    rows = "".join(
        f'<Override PartName="/{name}" ContentType="application/vnd.openxmlformats-officedocument.{kind}+xml"/>'
        for name, kind in parts.items()
    )
    return (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="xml" '
        f'ContentType="application/xml"/>{rows}</Types>'
    ).encode()


_DOCX: Final = {
    "[Content_Types].xml": _types(**{"word/document.xml": "wordprocessingml.document.main"}),
    "_rels/.rels": _related(("officeDocument", "word/document.xml")),
    "word/_rels/document.xml.rels": _related(("styles", "styles.xml"), ("footnotes", "footnotes.xml")),
    "word/styles.xml": f'<w:styles xmlns:w="{_WORD}"><w:style w:type="paragraph" w:styleId="H"><w:name w:val="heading 1"/>'
    f'<w:basedOn w:val="H"/></w:style></w:styles>'.encode(),
    "word/footnotes.xml": f'<w:footnotes xmlns:w="{_WORD}"><w:footnote w:id="1"><w:p><w:r><w:t>note</w:t></w:r></w:p></w:footnote>'
    f"</w:footnotes>".encode(),
    "word/document.xml": (
        f'<w:document xmlns:w="{_WORD}" xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><w:body><w:p><w:pPr>'
        '<w:pStyle w:val="H"/></w:pPr><w:r><w:t>Harbour</w:t></w:r></w:p><w:p><w:r><w:t>It opens at six.</w:t></w:r><w:r>'
        '<w:footnoteReference w:id="1"/></w:r><m:oMath><m:f><m:num><m:r><m:t>a</m:t></m:r></m:num><m:den><m:r><m:t>b</m:t></m:r>'
        "</m:den></m:f></m:oMath></w:p><w:tbl><w:tr><w:tc><w:p><w:r><w:t>1</w:t></w:r></w:p></w:tc><w:tc><w:p/></w:tc></w:tr>"
        "</w:tbl></w:body></w:document>"
    ).encode(),
    "docProps/core.xml": _CORE,
}
_XLSX: Final = {
    "[Content_Types].xml": _types(
        **{
            "xl/workbook.xml": "spreadsheetml.sheet.main",
            "xl/worksheets/sheet1.xml": "spreadsheetml.worksheet",
        }
    ),
    "_rels/.rels": _related(("officeDocument", "xl/workbook.xml")),
    "xl/_rels/workbook.xml.rels": _related(
        ("worksheet", "worksheets/sheet1.xml"), ("sharedStrings", "sharedStrings.xml")
    ),
    "xl/workbook.xml": f'<workbook xmlns="{_SHEET}" xmlns:r="{_OFFICE}"><sheets><sheet name="Ships" sheetId="1" r:id="r1"/></sheets>'
    f'<calcPr fullCalcOnLoad="1"/></workbook>'.encode(),
    "xl/sharedStrings.xml": f'<sst xmlns="{_SHEET}" count="1" uniqueCount="1"><si><t>name</t></si></sst>'.encode(),
    "xl/worksheets/sheet1.xml": (
        f'<worksheet xmlns="{_SHEET}"><dimension ref="A1:C3"/><sheetData><row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="inlineStr">'
        '<is><t>tons</t></is></c></row><row r="2"><c r="A2"><v>1</v></c><c r="B2"><f>A2*2</f><v>0</v></c><c r="C2" t="e"><v>#N/A</v></c>'
        "</row></sheetData></worksheet>"
    ).encode(),
    "docProps/core.xml": _CORE,
}
_EPUB: Final = {
    "mimetype": b"application/epub+zip",
    "META-INF/container.xml": b'<container xmlns="c"><rootfiles><rootfile full-path="o/p.opf"/></rootfiles></container>',
    "o/p.opf": (
        b'<package xmlns="p"><metadata><dc:title xmlns:dc="http://purl.org/dc/elements/1.1/">Port</dc:title></metadata><manifest>'
        b'<item id="a" href="a.xhtml" media-type="application/xhtml+xml"/><item id="b" href="b.xhtml" '
        b'media-type="application/xhtml+xml"/></manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
    ),
    "o/a.xhtml": _XHTML,
    "o/b.xhtml": _PAGE,
}


@cache
def _pptx() -> Mapping[str, bytes]:
    """Return the parts of a presentation with a table and notes; of a blank one, the layouts are left as they are."""
    import zipfile

    import pptx

    shown = pptx.Presentation()
    slide = shown.slides.add_slide(shown.slide_layouts[5])
    slide.shapes.title.text = "Harbour"
    table = slide.shapes.add_table(2, 2, 0, 0, 100, 100).table
    table.cell(0, 0).text = "ship"
    slide.notes_slide.notes_text_frame.text = "It opens at six."
    buffer = io.BytesIO()
    shown.save(buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


_XML_WORDS: Final = (
    *(
        b"<w:p>",
        b"</w:p>",
        b"<w:tbl>",
        b"<w:tr>",
        b"<w:tc>",
        b"<w:r>",
        b'<w:gridSpan w:val="999999999"/>',
        b'<w:vMerge w:val="x"/>',
    ),
    *(
        b'<w:basedOn w:val="H"/>',
        b'<c r="XFD1048576"><v>1</v></c>',
        b'<c r="ZZZ9999999"><f>1</f></c>',
        b'<row r="1048576">',
    ),
    *(
        b'<c r="A0"><f>1</f></c>',
        b'<c t="s"><v>99999999</v></c>',
        b'<dimension ref="A1:XFD1048576"/>',
        b"&amp;",
        b"&a;",
        b"<",
        b">",
    ),
    *(
        b'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>',
        b'Target="../../../etc/passwd" ',
    ),
    *(
        b'<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
        b'TargetMode="External" ',
        b"<a>",
        b"</a>",
        b"<m:oMath>",
        b"<m:f>",
    ),
    *(
        b'xmlns:w="x"',
        b"<itemref idref='a'/>",
        b"href='../../../etc/passwd'",
        b"<a:p>",
        b"<p:grpSp>",
        b"<p:sp>",
        b"<a:tbl>",
        b"\0",
    ),
    *(name.encode() for name in OUTSIDE),
)


def _laughs(parts: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """Return the parts with entities that expand a billion times in one of them."""
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    start = f'<!DOCTYPE x [<!ENTITY e0 "ha">{entities}]>'.encode()
    body = parts[name]
    at = body.rfind(b"</")
    return {**parts, name: start + body[:at] + b"&e9;" + body[at:]}


def _office(rng: Random) -> tuple[str, bytes]:
    suffix, parts = rng.choice(
        (
            (".docx", _DOCX),
            (".docx", _DOCX),
            (".xlsx", _XLSX),
            (".xlsx", _XLSX),
            (".epub", _EPUB),
            (".epub", _EPUB),
            (".pptx", _pptx()),
        )
    )
    if rng.random() < 0.01:
        parts = _laughs(parts, rng.choice([name for name in parts if parts[name].startswith(b"<")]))
    return f"file{suffix}", mutated_zip(rng, parts, _XML_WORDS)


DOCUMENTS: Final[Mapping[str, Reader]] = {
    "text": _reader(_text),
    "html": _reader(_html, own_process=True),
    "mail": _reader(_mail),
    "pdf": _reader(_pdf, own_process=True),
    "office": _reader(_office, own_process=True),
}
