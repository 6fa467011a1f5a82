"""Converts HTML to the text that a browser shows, with headings, tables and quotations.

selectolax's parser builds the tree that the HTML standard prescribes, for any markup.
"""

import re
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from kvweave.documents.extracted import without
from kvweave.documents.formulas import lowered, mathml_text, raised
from kvweave.errors import UnreadableDocument
from kvweave.types import Section

_DROPPED: Final = frozenset(
    "script style template svg head title iframe object audio video canvas datalist del".split()
)
_HEADINGS: Final = frozenset("h1 h2 h3 h4 h5 h6".split())
_PARAGRAPHS: Final = _HEADINGS.union("p ul ol dl table pre blockquote section article hr figure".split())
_LINES: Final = frozenset(
    "address aside body caption center dd details dialog div dt fieldset figcaption footer form header li main nav"
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
_SPACES: Final = re.compile(r"\s+")
_GAPS: Final = re.compile(r"\A[ \t\n]*\n|(?<![ \t])[ \t]+(?=\n)|\n[ \t]*(?=\n[ \t]*\n)")
"""White space at the ends of lines, and lines beyond one blank line."""

_VISIBLE: Final = re.compile(r"\S")

_MAX_HEAD_CHARS: Final = 300
"""A longer first row without `<th>` cells does not count as a header, since tables also lay out pages."""

_MAX_ROWS: Final = 65_534
_MAX_COLUMNS: Final = 100
"""The limits of the HTML standard are 65,534 and 1,000."""

_MAX_REPEATED_CHARS: Final = 100
"""A longer cell that spans several rows is not repeated in each of them."""

Extent = tuple[int, int]
_Kind = Literal["heading", "table", "below header", "below first row", "behind table", "quote"]


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
    tree, page = _tree(markup), _Page()
    page.read(tree.body or tree.root)
    return page.shown(_title(tree))


def _title(tree: Any) -> str:
    named = (tree.css_first("head > title, body > title"), tree.css_first("h1"))
    titles = (" ".join(str(each.text()).split()) for each in named if each is not None)
    return next(filter(None, titles), "")


def _tree(markup: str) -> Any:
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError

    # The parser shows <noscript>, as a browser without scripts does.
    markup = _NOSCRIPT.sub(r"\1template", markup)
    if _XHTML.match(markup[:2000]):
        markup = _SELF_CLOSED.sub(_with_end_tag, markup)
    try:
        return LexborHTMLParser(markup.encode("utf-8", "replace"))
    except SelectolaxError as error:  # says no more, also where memory runs out
        raise UnreadableDocument(
            "the parser gave this HTML up, which needs too much memory or is too deep"
        ) from error


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


def _end_of_header(table: Any) -> tuple[int, bool]:
    """Return the id of the row below a table's header, or else of its second row; and whether a header is marked."""
    groups = [each for each in table.iter() if each.tag in _ROW_GROUPS and not _is_hidden(each)]
    rows = [each for group in groups for each in group.iter() if each.tag == "tr" and not _is_hidden(each)]
    marked = any(each.tag == "thead" for each in groups) or any(
        each.tag == "th" and not _is_hidden(each) for row in rows[:1] for each in row.iter()
    )
    return next((each.mem_id for each in rows[1:] if each.parent.tag != "thead"), 0), marked


@dataclass(slots=True)
class _Mark:
    """A place in the text; headings and quotations also have an end, and headings a level."""

    kind: _Kind
    start: int
    level: int = 0
    end: int = 0


class _Page:
    """Builds the text of a page. `shown` removes superfluous white space; until then, offsets are those with it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._pre = 0
        self._cell_is_empty: bool | None = None  # None outside of cells
        self._grids: list[_Grid] = []
        self._below_header, self._has_header = 0, False  # in the outermost table
        self._marks: list[_Mark] = []
        self._open: list[_Mark] = []  # headings and quotations

    def read(self, root: Any) -> None:
        """Read the children of a node. The walk is no recursion, since elements may be nested by thousands."""
        node, depth = (root.child if root else None), 1
        while node is not None:
            child = node.child if self._enter(node) else None
            if child is not None:
                node, depth = child, depth + 1
                continue
            while (following := node.next) is None and depth > 1:
                node, depth = node.parent, depth - 1
                self._leave(node, str(node.tag))
            node = following

    def shown(self, title: str) -> HtmlText:
        """Return the page without superfluous white space, and where its sections and quotations begin."""
        text, moved = without(_GAPS, "".join(self._parts))
        text = text.rstrip() + "\n" if text.strip() else ""
        path: list[tuple[int, str]] = []
        sections: dict[int, Section] = {}
        quotes: list[Extent] = []
        table = 0
        for mark in self._marks:
            if (seen := _VISIBLE.search(text, moved(mark.start))) is None:
                break
            at, end, head = seen.start(), moved(mark.end), ""
            if mark.kind == "quote":
                if not quotes or quotes[-1][1] <= at:  # not within another
                    quotes.append((at, end))
                continue
            if mark.kind == "heading":
                words = " ".join(text[at:end].split())[:200]
                path = [each for each in path if each[0] < mark.level] + [(mark.level, words)]
            elif mark.kind == "table":
                table = text.rfind("\n", 0, at) + 1
            elif mark.kind in ("below header", "below first row"):
                head = text[table : text.rfind("\n", 0, at) + 1].rstrip() + "\n"
                if not head.strip() or (mark.kind == "below first row" and len(head) > _MAX_HEAD_CHARS):
                    continue
                at = table
            if head or path or sections:
                sections[at] = Section(at, heading=tuple(words for _, words in path), head=head)
        return HtmlText(text, title, tuple(sections.values()), tuple(quotes))

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
            self._add_cells(self._grids[-1].above())
            self._grids[-1].start = len(self._parts)
            self._cell_is_empty = True
        elif tag in _ROW_GROUPS:
            self._grids[-1].reaching.clear()  # no cell reaches into another group of rows
        elif tag in _STRUCK:
            self._data("~~")
        self._begin(node, tag)
        self._break(tag, opening=True)
        if node.child is None:
            self._leave(node, tag)
            return False
        return True

    def _begin(self, node: Any, tag: str) -> None:
        """Mark where a heading, quotation or outermost table begins, and the rows below its header."""
        if tag in _HEADINGS or tag == "blockquote":
            self._mark("quote") if tag == "blockquote" else self._mark("heading", int(tag[1]))
            self._open.append(self._marks[-1])
        elif tag == "table":
            if not self._grids:
                self._mark("table")
                self._below_header, self._has_header = _end_of_header(node)
            self._grids.append(_Grid())
        elif tag == "tr" and node.mem_id == self._below_header:
            self._mark("below header" if self._has_header else "below first row")
        elif tag == "pre":
            self._pre += 1

    def _mark(self, kind: _Kind, level: int = 0) -> None:
        self._marks.append(_Mark(kind, self._length, level))

    def _leave(self, node: Any, tag: str) -> None:
        if tag == "tr":
            self._add_cells(self._grids[-1].above(to_end=True))
            self._grids[-1].end_row()
        self._break(tag, opening=False)
        if tag in _CELLS:
            self._cell_is_empty = None
            self._append("\t" * self._grids[-1].end_cell(node.attributes, self._parts))
        elif tag in _STRUCK:
            self._data("~~ ")
        elif tag in _HEADINGS or tag == "blockquote":
            self._open.pop().end = self._length
        elif tag == "table":
            self._grids.pop()
            if not self._grids:
                self._mark("behind table")
        elif tag == "pre":
            self._pre -= 1

    def _formula(self, node: Any, tag: str) -> str:
        if tag == "math":
            return mathml_text(node)
        before = self._parts[-1][-2:] if self._parts else ""
        text = " ".join(str(node.text()).split())
        return raised(text, before) if tag == "sup" else lowered(text, before)

    def _add_cells(self, cells: list[str]) -> None:
        for cell in cells:
            self._data(cell)
            self._append("\t")

    def _data(self, data: str) -> None:
        if not self._pre:
            data = _SPACES.sub(" ", data)
            if not self._parts or self._parts[-1][-1:].isspace():
                data = data.lstrip(" ")
        if data:
            if self._cell_is_empty and data.strip():
                self._cell_is_empty = False
            self._append(data)

    def _append(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def _break(self, tag: str, *, opening: bool) -> None:
        if tag == "p" and self._cell_is_empty is not None and (self._cell_is_empty or not opening):
            return  # a cell's only paragraph is no paragraph
        begins_line = tag in _LINES and self._parts and not self._parts[-1].endswith("\n")
        if tag in _PARAGRAPHS:
            self._append("\n\n")
        elif begins_line or (tag == "br" and opening):
            self._append("\n")
        if tag == "li" and opening:
            self._append("- ")


class _Grid:
    """The columns of one table, and which cells reach into the rows below theirs."""

    def __init__(self) -> None:
        self._column = 0
        self.start = 0  # of the open cell, among the parts of the text
        self.reaching: dict[int, tuple[int, str]] = {}  # by column: how many rows, and the text to repeat

    def above(self, *, to_end: bool = False) -> list[str]:
        """Go behind the cells from above that stand here, or in the rest of the row; return their texts."""
        last = max(self.reaching, default=-1) if to_end else -1
        texts = []
        while self._column in self.reaching or self._column <= last:
            texts.append(self.reaching.get(self._column, (0, ""))[1])
            self._column += 1
        return texts

    def end_cell(self, attributes: Any, parts: list[str]) -> int:
        """End a cell; return how many columns it spans."""
        rows = _span(attributes.get("rowspan"), _MAX_ROWS) or _MAX_ROWS  # 0 means all further rows
        columns = _span(attributes.get("colspan"), _MAX_COLUMNS) or 1
        text = "".join(parts[self.start :]).strip() if rows > 1 else ""
        text = text if len(text) <= _MAX_REPEATED_CHARS and "\n" not in text else ""
        for column in range(columns):
            self.reaching[self._column + column] = (rows, "" if column else text)
        self._column += columns
        return columns

    def end_row(self) -> None:
        """Go to the next row's first column."""
        self.reaching = {at: (rows - 1, text) for at, (rows, text) in self.reaching.items() if rows > 1}
        self._column = 0


def _span(value: str | None, most: int) -> int:
    """Return how many rows or columns a cell spans, from its attribute; 1 if that is no number."""
    digits = re.match(r"\s*\+?(\d{1,9})", value or "1")
    return min(int(digits[1]), most) if digits else 1
