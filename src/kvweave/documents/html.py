"""Converts HTML to the text that a browser shows, with headings, tables and quotations.

selectolax's parser builds the tree that the HTML standard prescribes, for any markup.
"""

import re
from typing import Any, Final, Literal, NamedTuple

from kvweave.documents.formulas import lowered, mathml_text, raised
from kvweave.types import Section

_DROPPED: Final = frozenset(
    "script style template svg head title iframe object audio video canvas datalist del".split()
)
_HEADINGS: Final = frozenset("h1 h2 h3 h4 h5 h6".split())
_PARAGRAPHS: Final = _HEADINGS.union("p ul ol dl table pre blockquote section article hr figure".split())
_LINES: Final = frozenset(
    "address aside body br caption center dd details dialog div dt fieldset figcaption footer form header li main nav"
    " option summary tr".split()
)
_CELLS: Final = frozenset({"td", "th"})
_ROW_GROUPS: Final = frozenset({"thead", "tbody", "tfoot"})
_STRUCK: Final = frozenset({"s", "strike"})
_HIDING_STYLE: Final = re.compile(r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_NOSCRIPT: Final = re.compile(r"(?i)(</?)noscript(?=[\s/>])")
_XHTML: Final = re.compile(r"\s*<\?xml|[^>]*>?\s*<html[^>]*xmlns", re.IGNORECASE)
_SELF_CLOSED: Final = re.compile(r"<([A-Za-z][\w-]{0,30})(\s[^<>]*)?/>")
_VOID: Final = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_MARK: Final = "\ufdd0"
"""Marks, while a page is read, where a heading, table or quotation begins or ends; Unicode has no such character."""

_MAX_HEAD_CHARS: Final = 300
"""A longer first row without `<th>` cells does not count as a header, since tables also lay out pages."""

_MAX_ROWS: Final = 65_534
_MAX_COLUMNS: Final = 100
"""The limits of the HTML standard are 65,534 and 1,000."""

_MAX_REPEATED_CHARS: Final = 100
"""A longer cell that spans several rows is not repeated in each of them."""

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

    Scripts, styles, the head, deleted text and elements that are hidden by an attribute are dropped. Blank lines separate
    paragraphs and headings; each list item and table row has a line. A cell that spans several rows is repeated in each.
    `<pre>` keeps its white space, and entities are decoded. Formulas are on one line: "10^6". The title comes from the head
    or the first heading; otherwise it is empty.
    """
    page = _Page()
    title = page.read(_tree(markup.replace(_MARK, "")))
    text, groups = page.marked_text()
    plain, sections, quotes = _placed(text, groups)
    return HtmlText(plain, title, sections, quotes)


def _tree(markup: str) -> Any:
    from selectolax.lexbor import LexborHTMLParser

    # The parser shows <noscript>, as a browser without scripts does.
    markup = _NOSCRIPT.sub(r"\1template", markup)
    if _XHTML.match(markup[:2000]):
        markup = _SELF_CLOSED.sub(_with_end_tag, markup)
    return LexborHTMLParser(markup.encode("utf-8", "replace"))


def _with_end_tag(tag: re.Match[str]) -> str:
    """Return an empty element of XHTML with its end tag: in HTML, `<title/>` is a start tag."""
    return tag[0] if tag[1].lower() in _VOID else f"<{tag[1]}{tag[2] or ''}></{tag[1]}>"


def _is_hidden(node: Any) -> bool:
    attributes = node.attributes
    if not attributes:
        return False
    hidden = "hidden" in attributes and attributes["hidden"] != "until-found"
    return (
        hidden
        or attributes.get("aria-hidden") == "true"
        or _HIDING_STYLE.search(attributes.get("style") or "") is not None
    )


def _only_formula(node: Any) -> str:
    """Return the formula of an element that has nothing else: Wikipedia hides it beside a picture of it."""
    formula = node.css_first("math")
    is_alone = formula is not None and str(node.text()).strip() == str(formula.text()).strip()
    return mathml_text(formula) if is_alone else ""


class _Mark:
    """Something that begins or ends in the text, with the `words` of a heading; `certain` for rows below a marked header."""

    def __init__(self, event: _Event, level: int = 0) -> None:
        self.event, self.level = event, level
        self.words: list[str] = []
        self.certain = False


class _Page:
    def __init__(self) -> None:
        self._parts: list[str] = []
        self._pre = 0
        self._waiting: list[_Mark] = []
        self._groups: list[list[_Mark]] = []
        self._heading: _Mark | None = None
        self._tables = _Tables()
        self._grids: list[_Grid] = []
        self._quotes = 0
        self._cell_is_empty: bool | None = None  # None outside of cells

    def read(self, tree: Any) -> str:
        """Read a page and return its title. The walk is no recursion, since elements may be nested by thousands."""
        root = tree.body or tree.root
        node, depth = (root.child if root else None), 1
        while node is not None:
            child = node.child if self._enter(node) else None
            if child is not None:
                node, depth = child, depth + 1
                continue
            while (following := node.next) is None and depth > 1:
                node, depth = node.parent, depth - 1
                self._leave(str(node.tag))
            node = following
        head, heading = tree.css_first("head > title, body > title"), tree.css_first("h1")
        titles = (" ".join(str(each.text()).split()) for each in (head, heading) if each is not None)
        return next(filter(None, titles), "")

    def marked_text(self) -> tuple[str, list[list[_Mark]]]:
        """Return the text with a _MARK wherever something begins or ends, and for each _MARK a list of these."""
        text = "".join(self._parts)
        text = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", text)
        text = re.sub(r"[ \t]+\n", "\n", text)
        text = re.sub(r"\n{3,}", "\n\n", text).lstrip("\n").rstrip() + "\n" if text.strip() else ""
        return text, self._groups

    def _enter(self, node: Any) -> bool:
        """Take a node of the tree; return whether its children are to be read, and `_leave` called behind them."""
        tag = str(node.tag)
        if tag == "-text":
            self._data(str(node.text_content or ""))
            return False
        if tag in _DROPPED or tag.startswith(("-", "!")):
            return False
        if _is_hidden(node):
            self._data(_only_formula(node))
            return False
        if tag in ("math", "sup", "sub"):
            self._data(self._formula(node, tag))
            return False
        if tag in _CELLS:
            self._spanned(self._grids[-1].before_cell())
            self._grids[-1].begin_cell(node.attributes, len(self._parts))
        elif tag in _ROW_GROUPS:
            self._grids[-1].begin_group()
        self._pre += tag == "pre"
        self._begin(tag)
        self._break(tag, opening=True)
        if tag == "table":
            self._grids.append(_Grid())
        if node.child is None:
            self._leave(tag)
            return False
        return True

    def _formula(self, node: Any, tag: str) -> str:
        if tag == "math":
            return mathml_text(node)
        before = self._parts[-1][-2:] if self._parts else ""
        text = " ".join(str(node.text()).split())
        return raised(text, before) if tag == "sup" else lowered(text, before)

    def _spanned(self, cells: list[str]) -> None:
        """Append cells that began in a row above."""
        for cell in cells:
            if cell:
                self._data(cell)
            self._parts.append("\t")

    def _leave(self, tag: str) -> None:
        if tag == "pre":
            self._pre -= 1
        if tag == "tr":
            self._spanned(self._grids[-1].end_row())
        if tag == "table":
            self._grids.pop()
        self._break(tag, opening=False)
        if tag in _CELLS:
            self._parts += ["\t"] * self._grids[-1].end_cell(self._parts)
        self._end(tag)

    def _data(self, data: str) -> None:
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
        if tag in _STRUCK:
            self._data("~~")

    def _end(self, tag: str) -> None:
        if tag in _HEADINGS:
            self._heading = None
        self._waiting += self._tables.end(tag)
        if tag == "blockquote" and self._quotes:
            self._quotes -= 1
            self._waiting.append(_Mark("quote end"))
        if tag in _STRUCK:
            self._data("~~ ")

    def _break(self, tag: str, *, opening: bool) -> None:
        if tag in _CELLS:
            self._cell_is_empty = opening
        if tag == "p" and self._cell_is_empty is not None and (self._cell_is_empty or not opening):
            return  # a cell's only paragraph is no paragraph
        if tag in _PARAGRAPHS:
            self._parts.append("\n\n")
        elif tag == "br" or (tag in _LINES and self._parts and not self._parts[-1].endswith("\n")):
            if tag != "br" or opening:
                self._parts.append("\n")
        elif tag in _CELLS and not opening:
            self._cell_is_empty = None
            self._parts.append("\t")
        if tag == "li" and opening:
            self._parts.append("- ")


class _Grid:
    """The columns of one table: which cells of the rows above reach into a row."""

    def __init__(self) -> None:
        self._column = self._start = 0
        self._rows = self._columns = 1  # that the open cell spans
        self._above: dict[
            int, tuple[int, str]
        ] = {}  # by column: rows from this one on, and the text to repeat
        self._below: dict[int, tuple[int, str]] = {}

    def begin_group(self) -> None:
        """Begin a group of rows, into which no cell from above reaches."""
        self._above.clear()

    def before_cell(self) -> list[str]:
        """Return the cells from above that stand before the row's next own cell."""
        cells = []
        while self._column in self._above:
            cells.append(self._taken())
        return cells

    def begin_cell(self, attributes: Any, start: int) -> None:
        """Begin a cell whose text will be in the parts from `start`."""
        self._start = start
        self._rows = _span(attributes.get("rowspan"), _MAX_ROWS) or _MAX_ROWS  # 0 means all further rows
        self._columns = _span(attributes.get("colspan"), _MAX_COLUMNS) or 1

    def end_cell(self, parts: list[str]) -> int:
        """End a cell; return how many columns more than one it spans."""
        if self._rows > 1:
            text = "".join(parts[self._start :]).replace(_MARK, "").strip()
            text = text if len(text) <= _MAX_REPEATED_CHARS and "\n" not in text else ""
            for column in range(self._columns):
                self._below[self._column + column] = (self._rows - 1, "" if column else text)
        self._column += self._columns
        return self._columns - 1

    def end_row(self) -> list[str]:
        """Return the cells from above that stand behind the row's own cells."""
        cells = [self._taken() for _ in range(self._column, max(self._above, default=-1) + 1)]
        self._column, self._above, self._below = 0, self._below, {}
        return cells

    def _taken(self) -> str:
        """Return the cell from above in this column, empty if there is none, and go to the next column."""
        rows, text = self._above.get(self._column, (0, ""))
        if rows > 1:
            self._below[self._column] = (rows - 1, text)
        self._column += 1
        return text


def _span(value: str | None, most: int) -> int:
    """Return how many rows or columns a cell spans, from its attribute; 1 if that is no number."""
    digits = re.match(r"\s*\+?(\d{1,9})", value or "1")
    return min(int(digits[1]), most) if digits else 1


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
