"""Reads text formats: plain text, Markdown, reStructuredText, HTML, JSON, tables as CSV, Jupyter notebooks."""

import csv
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

from kvweave.documents.encodings import Decoded, decode
from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder, clean, damaged, section_at
from kvweave.documents.html import read_html
from kvweave.types import Section

_UNDERLINED: Final = re.compile(r"^(?=\S)(.+)\n([=\-~^\"'`#*+])\2{2,}[ \t]*$", re.MULTILINE)
_ATX_HEADING: Final = re.compile(r"^(#{1,6})[ \t]+([^ \t\n].*)$", re.MULTILINE)
_FENCED: Final = re.compile(r"^(```|~~~).*?(^\1|\Z)", re.MULTILINE | re.DOTALL)
_TABLE_RULE: Final = re.compile(r"\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?")
"""The line below a table's header. All patterns here take linear time, since a line may have megabytes."""

_NUMBER: Final = re.compile(r"[-+]?[\d.,:/\s%€$£]+")
_FRONT_MATTER: Final = re.compile(
    r"(---|\+\+\+)[ \t]*\n(?=[ \t]*[\w\"'-][^\n:=]*[:=]|\1)(?:[^\n]*\n)*?(?:\1|\.\.\.)[ \t]*(?:\n|\Z)"
)
"""Data about the text before its beginning, in YAML or TOML: its first line has a key."""

_FRONT_TITLE: Final = re.compile(
    r"""^title[ \t]*[:=][ \t]*(["']?)(?![>|\s])(.+?)\1[ \t]*$""", re.MULTILINE | re.IGNORECASE
)
_EMBEDDED: Final = re.compile(
    r"data:[\w.+-]{1,100}/[\w.+-]{1,100}(?:;[\w=.+-]{1,100}){0,5};base64,[A-Za-z0-9+/=_-]{40,}"
)
_ESCAPED: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_MAX_HEADER_CHARS: Final = 10_000
_MAX_OUTPUT_CHARS: Final = 2_000
"""Longest kept output of a notebook's cell; a training loop prints megabytes."""

Heading = tuple[int, str, str]
"""A heading's offset, its mark (which gives the level), and its words."""


def read_plain(data: bytes, ctx: ReadContext) -> Extracted:
    """Read text without known headings: source code, logs, data."""
    return _extracted(_decoded(data))


def read_json(data: bytes, ctx: ReadContext) -> Extracted:
    """Read JSON, also with a value on each line, as it is written, but with letters in place of escapes such as `\\u00e9`."""
    text, note = _decoded(data)
    return _extracted(Decoded(clean(_ESCAPED.sub(_letter, text)), note))


def _letter(escape: re.Match[str]) -> str:
    """Return the letter or half of a surrogate pair of an escape; white space for line ends and tabs, which part words."""
    if escape[1] is None:
        return {"\\n": " ", "\\r": " ", "\\t": " ", "\\/": "/"}.get(escape[0], escape[0])
    letter = chr(int(escape[1], 16))
    return escape[0] if letter in '"\\\u2028\u2029' or unicodedata.category(letter) == "Cc" else letter


def _decoded(data: bytes) -> Decoded:
    """Decode a text file, without the pictures and fonts that are embedded in it as base64."""
    text, note = decode(data)
    return Decoded(_EMBEDDED.sub("", text) if ";base64," in text else text, note)


def _extracted(found: Decoded, title: str = "", sections: tuple[Section, ...] = ()) -> Extracted:
    return Extracted(found.text, title, sections, found.notes, numbered_lines=True)


def read_prose(data: bytes, ctx: ReadContext) -> Extracted:
    """Read plain text or reStructuredText with underlined headings; the first heading is the title."""
    read = _decoded(data)
    title, plain = _without_front_matter(read.text)
    found = [(each.start(), each[2], each[1].strip()) for each in _UNDERLINED.finditer(plain)]
    return _extracted(read, title or (found[0][2] if found else ""), _sections(found))


def read_markdown(data: bytes, ctx: ReadContext) -> Extracted:
    """Read Markdown; the first heading is the title, unless data before the text has one."""
    read = _decoded(data)
    return _extracted(read, *_markdown(read.text))


def read_page(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the text that a browser shows for HTML."""
    read = decode(data)
    page = read_html(read.text)
    return Extracted(page.text, page.title, page.sections, read.notes)


def _without_front_matter(text: str) -> tuple[str, str]:
    """Return the title in the data before a text, which may be empty, and the text with spaces in place of these data."""
    found = _FRONT_MATTER.match(text)
    if found is None:
        return "", text
    named = _FRONT_TITLE.search(found[0])
    return named[2].strip() if named else "", " " * found.end() + text[found.end() :]


# Headings and tables of Markdown


def _markdown(text: str) -> tuple[str, tuple[Section, ...]]:
    """Return the title and the sections, which start at headings, at tables and after tables."""
    named, plain = _without_front_matter(text)
    plain = _FENCED.sub(lambda block: " " * len(block[0]), plain)
    found: list[Heading] = [
        (each.start(), each[1], each[2].rstrip().rstrip("#").rstrip())
        for each in _ATX_HEADING.finditer(plain)
    ]
    underlined = [
        (each.start(), "#" if each[2] == "=" else "##", each[1].strip())
        for each in _UNDERLINED.finditer(plain)
        if each[2] in "=-" and "|" not in each[1]
    ]
    title = named or next((words for _, _, words in found + underlined), "")
    return title, _with_tables(plain, _sections(sorted(found + underlined)))


def _sections(headings: list[Heading]) -> tuple[Section, ...]:
    """Return a section for each heading. The level is the number of `#`; for other marks, the order of their first use."""
    order = list(dict.fromkeys(mark for _, mark, _ in headings if not mark.startswith("#")))
    path: list[tuple[int, str]] = []
    sections = []
    for start, mark, words in headings:
        level = len(mark) if mark.startswith("#") else order.index(mark) + 1
        path = [each for each in path if each[0] < level] + [(level, words[:200])]
        sections.append(Section(start, heading=tuple(words for _, words in path)))
    return tuple(sections)


def _with_tables(text: str, headings: tuple[Section, ...]) -> tuple[Section, ...]:
    found = {each.start: each for each in headings}
    for start, end, head in _tables(text):
        found.setdefault(end, Section(end, heading=section_at(headings, end).heading))
        found[start] = Section(start, heading=section_at(headings, start).heading, head=head)
    return tuple(found[start] for start in sorted(found))


def _tables(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start and end of each table, and its first two lines: the header and the rule below it."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text) if "|" in text else []
    lines.append("")
    at, number = 0, 0
    while number + 1 < len(lines):
        header, rule = lines[number : number + 2]
        if "|" not in header or not rule.endswith("\n") or not _TABLE_RULE.fullmatch(rule.strip()):
            at, number = at + len(header), number + 1
            continue
        start, at, number = at, at + len(header) + len(rule), number + 2
        while "|" in lines[number]:
            at, number = at + len(lines[number]), number + 1
        yield start, at, header + rule


# Tables as CSV


def read_csv(data: bytes, ctx: ReadContext) -> Extracted:
    """Read comma-separated values as they are. If the first record looks like a header, every chunk repeats it."""
    read = _decoded(data)
    header = _header(read.text)
    return _extracted(read, "", (Section(0, head=header),) if header else ())


def _header(text: str) -> str:
    """Return the first record with its line end if it names columns, without empty cells and numbers; otherwise nothing."""
    lines = text[:_MAX_HEADER_CHARS].splitlines(keepends=True)
    try:
        dialect = csv.Sniffer().sniff(text[:_MAX_HEADER_CHARS].partition("\n")[0] + "\n", delimiters=",;\t|")
        reader = csv.reader(lines, dialect)
        names = [cell.strip() for cell in next(reader, [])]
    except csv.Error:
        return ""
    names_columns = len(names) > 1 and all(name and not _NUMBER.fullmatch(name) for name in names[:-1])
    return "".join(lines[: reader.line_num]) if names_columns and reader.line_num < len(lines) else ""


# Jupyter notebooks


def read_notebook(data: bytes, ctx: ReadContext) -> Extracted:
    """Read the text, code and printed results of a notebook as Markdown. A section's last heading is its cell's number."""
    read = decode(data)
    with damaged("notebook"):
        book = json.loads(read.text)
        cells = (
            book["cells"] if "cells" in book else [c for sheet in book["worksheets"] for c in sheet["cells"]]
        )
        language = str(book.get("metadata", {}).get("kernelspec", {}).get("language", "python"))
        built, starts = TextBuilder(), []
        for cell in cells:
            starts.append(built.length)
            _add_cell(built, cell, language)
    title, sections = _markdown(built.text())
    return Extracted(built.text(), title, _with_cells(sections, starts), read.notes)


def _add_cell(built: TextBuilder, cell: Any, language: str) -> None:
    text = _EMBEDDED.sub("", _joined(cell.get("source", cell.get("input", "")))).strip()
    if cell["cell_type"] != "code":
        built.add(f"{text}\n\n" if text else "")
        return
    if text:
        built.add(f"```{language}\n{text}\n```\n\n")
    for output in cell.get("outputs", ()):
        shown = output.get("data", output)
        said = _joined(shown.get("text/plain") or shown.get("text") or "").strip()
        if output.get("output_type") in ("error", "pyerr"):
            said = f"{output.get('ename', 'error')}: {output.get('evalue', '')}"
        if said:
            built.add(f"```\n{said[:_MAX_OUTPUT_CHARS]}\n```\n\n")


def _joined(lines: Any) -> str:
    return lines if isinstance(lines, str) else "".join(map(str, lines))


def _with_cells(sections: tuple[Section, ...], starts: list[int]) -> tuple[Section, ...]:
    """Start a section at each cell, and add the cell's number to the headings of all sections."""
    found = []
    for start in sorted({*starts, *(each.start for each in sections)}):
        section, cell = section_at(sections, start), f"cell {bisect_right(starts, start)}"
        head = section.head if section.start == start else ""
        found.append(Section(start, heading=(*section.heading, cell), head=head))
    return tuple(found)
