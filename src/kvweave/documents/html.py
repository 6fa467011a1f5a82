"""Converts HTML to the text that a browser shows, with headings, tables and quotations; uses the standard library's parser."""

import re
from html.parser import HTMLParser
from typing import Final, Literal, NamedTuple

from kvweave.types import Section

_DROPPED: Final = frozenset("script style template noscript svg math head title iframe object".split())
_HEADINGS: Final = frozenset("h1 h2 h3 h4 h5 h6".split())
_PARAGRAPHS: Final = _HEADINGS.union("p ul ol dl table pre blockquote section article hr figure".split())
_LINES: Final = frozenset(
    "address aside body br caption center dd details dialog div dt fieldset figcaption footer form header li main nav"
    " option summary tr".split()
)
_CELLS: Final = frozenset({"td", "th"})
_MARK: Final = "\ufdd0"
"""Marks, while a page is read, where a heading, table or quotation begins or ends; Unicode has no such character."""

_MAX_HEAD_CHARS: Final = 300
"""A longer first row without `<th>` cells does not count as a header, since tables also lay out pages."""

Extent = tuple[int, int]
_Event = Literal["heading", "table", "rows", "table end", "quote", "quote end"]


class HtmlText(NamedTuple):
    """A page's text and title, its sections (headings and tables), and the start and end of each quotation."""

    text: str
    title: str
    sections: tuple[Section, ...] = ()
    quotes: tuple[Extent, ...] = ()


def read_html(markup: str) -> HtmlText:
    """Convert a page.

    Scripts, styles and the head are dropped. Blank lines separate paragraphs and headings; each list item and table row
    has a line. `<pre>` keeps its white space, and entities are decoded. The title comes from the head or the first
    heading; otherwise it is empty.
    """
    page = _Page()
    page.feed(markup.replace(_MARK, ""))
    page.close()
    text, groups = page.marked_text()
    plain, sections, quotes = _placed(text, groups)
    return HtmlText(plain, page.title(), sections, quotes)


class _Mark:
    """Something that begins or ends in the text, with the `words` of a heading; `certain` for rows below a marked header."""

    def __init__(self, event: _Event, level: int = 0) -> None:
        self.event, self.level = event, level
        self.words: list[str] = []
        self.certain = False


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._dropped: list[str] = []
        self._pre = 0
        self._titles: dict[str, list[str]] = {"title": [], "h1": []}
        self._inside: str | None = None
        self._waiting: list[_Mark] = []
        self._groups: list[list[_Mark]] = []
        self._heading: _Mark | None = None
        self._tables = _Tables()
        self._quotes = 0
        self._cell_is_empty: bool | None = None  # None outside of cells

    def marked_text(self) -> tuple[str, list[list[_Mark]]]:
        """Return the text with a _MARK wherever something begins or ends, and for each _MARK a list of these."""
        text = "".join(self._parts)
        text = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", text)
        text = re.sub(r"[ \t]+\n", "\n", text)
        text = re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n" if text.strip() else ""
        return text, self._groups

    def title(self) -> str:
        head, heading = (" ".join("".join(parts).split()) for parts in self._titles.values())
        return head or heading

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self._dropped.clear()  # a head that was never closed ends here
        if tag in self._titles and not self._titles[tag] and "svg" not in self._dropped:
            self._inside = tag
        if tag in _DROPPED:
            self._dropped.append(tag)
        elif not self._dropped:
            self._pre += tag == "pre"
            self._begin(tag)
            self._break(tag, opening=True)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _DROPPED and not self._dropped:
            self._break(tag, opening=True)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None
        if tag in self._dropped:
            while self._dropped.pop() != tag:
                pass
        elif not self._dropped:
            if tag == "pre":
                self._pre = max(0, self._pre - 1)
            self._break(tag, opening=False)
            self._end(tag)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._titles[self._inside].append(data)
        if self._dropped:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if not self._parts or self._parts[-1][-1:].isspace():
                data = data.lstrip(" ")
        if data:
            if self._heading is not None:
                self._heading.words.append(data)
            if self._waiting and data.strip():
                data = data[: len(data) - len(data.lstrip())] + _MARK + data.lstrip()
                self._groups.append(self._waiting)
                self._waiting = []
            if self._cell_is_empty and data.strip():
                self._cell_is_empty = False
            self._parts.append(data)

    def _begin(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._heading = _Mark("heading", int(tag[1]))
            self._waiting.append(self._heading)
        self._waiting += self._tables.begin(tag)
        if tag == "blockquote":
            self._quotes += 1
            self._waiting.append(_Mark("quote"))

    def _end(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._heading = None
        self._waiting += self._tables.end(tag)
        if tag == "blockquote" and self._quotes:
            self._quotes -= 1
            self._waiting.append(_Mark("quote end"))

    def _break(self, tag: str, *, opening: bool) -> None:
        if tag in _CELLS:
            self._cell_is_empty = opening
        if tag == "p" and self._cell_is_empty is not None and (self._cell_is_empty or not opening):
            return  # a cell's only paragraph is no paragraph
        if tag in _PARAGRAPHS:
            self._parts.append("\n\n")
        elif tag == "br" or (tag in _LINES and self._parts and not self._parts[-1].endswith("\n")):
            self._parts.append("\n")
        elif tag in _CELLS:
            if not opening:
                self._cell_is_empty = None
            if not opening or (self._parts and not self._parts[-1].endswith(("\t", "\n"))):
                self._parts.append("\t")  # cells may be left open
        if tag == "li" and opening:
            self._parts.append("- ")


class _Tables:
    """Finds where an outermost table begins and ends, and where the rows below its header begin."""

    def __init__(self) -> None:
        self._depth = self._rows = 0
        self._in_head = self._has_header = self._marked = False

    def begin(self, tag: str) -> list[_Mark]:
        if tag == "table":
            self._depth += 1
            if self._depth == 1:
                self._rows, self._in_head, self._has_header, self._marked = 0, False, False, False
                return [_Mark("table")]
        if self._depth != 1:
            return []
        if tag == "thead":
            self._in_head = self._has_header = True
        if tag == "th" and self._rows == 1:
            self._has_header = True
        if tag == "tr":
            self._rows += 1
            if self._rows > 1 and not self._in_head and not self._marked:
                self._marked, mark = True, _Mark("rows")
                mark.certain = self._has_header
                return [mark]
        return []

    def end(self, tag: str) -> list[_Mark]:
        if tag == "thead" and self._depth == 1:
            self._in_head = False
        if tag == "table" and self._depth:
            self._depth -= 1
            return [] if self._depth else [_Mark("table end")]
        return []


def _placed(marked: str, groups: list[list[_Mark]]) -> tuple[str, tuple[Section, ...], tuple[Extent, ...]]:
    """Return the text without marks, and the sections and quotations between the marks."""
    pieces = marked.split(_MARK)
    text = "".join(pieces)
    sections = _Sections(text)
    offset = 0
    for piece, group in zip(pieces, groups, strict=False):
        offset += len(piece)
        for mark in group:
            sections.take(mark, offset)
    return text, tuple(sections.found.values()), tuple(sections.quotes(len(text)))


class _Sections:
    def __init__(self, text: str) -> None:
        self._text = text
        self._path: list[tuple[int, str]] = []
        self._table: int | None = None
        self._quote_starts: list[int] = []
        self._quotes: list[Extent] = []
        self.found: dict[int, Section] = {}

    def take(self, mark: _Mark, offset: int) -> None:
        if mark.event == "heading":
            words = " ".join("".join(mark.words).split())[:200]
            self._path = [each for each in self._path if each[0] < mark.level] + [(mark.level, words)]
            self._put(offset)
        elif mark.event == "table":
            self._table = offset
            self._put(offset)
        elif mark.event == "rows" and self._table is not None:
            start = self._text.rfind("\n", 0, self._table) + 1
            end = self._text.rfind("\n", 0, offset) + 1
            head = self._text[start:end].rstrip() + "\n"
            if start < end and head.strip() and (mark.certain or len(head) <= _MAX_HEAD_CHARS):
                self._put(start, head)
        elif mark.event == "table end":
            self._table = None
            self._put(offset)
        elif mark.event == "quote":
            self._quote_starts.append(offset)
        elif mark.event == "quote end" and self._quote_starts:
            self._close_quote(offset)

    def quotes(self, end: int) -> list[Extent]:
        """Return the outermost quotations; one that is still open ends with the text."""
        while self._quote_starts:
            self._close_quote(end)
        return self._quotes

    def _close_quote(self, end: int) -> None:
        start = self._quote_starts.pop()
        if not self._quote_starts:
            self._quotes.append((start, end))

    def _put(self, offset: int, head: str = "") -> None:
        if head or self._path or self.found:
            heading = tuple(words for _, words in self._path)
            self.found[offset] = Section(offset, heading=heading, head=head)
