"""Converts HTML to plain text, as a reader sees the page.

Parses with the standard library; knows nothing about files.
"""

import re
from html.parser import HTMLParser
from typing import Final

_DROPPED: Final = frozenset("script style template noscript svg math head title iframe object".split())
_HEADINGS: Final = frozenset("h1 h2 h3 h4 h5 h6".split())
_PARAGRAPHS: Final = _HEADINGS.union("p ul ol dl table pre blockquote section article hr figure".split())
_LINES: Final = frozenset(
    "address aside body br caption center dd details dialog div dt fieldset figcaption footer form header li main nav"
    " option summary tr".split()
)
_CELLS: Final = frozenset({"td", "th"})


def read_html(markup: str) -> tuple[str, str]:
    """Return a page's text and title.

    Scripts, styles and the head are dropped. Paragraphs and headings are separated by blank lines; list items and table
    rows get a line each. `<pre>` keeps its white space, and entities are decoded.

    Returns:
        (text, title); the title is that of the head, else the first heading, else empty.
    """
    page = _Page()
    page.feed(markup)
    page.close()
    return page.text(), page.title()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._dropped: list[str] = []
        self._pre = 0
        self._titles: dict[str, list[str]] = {"title": [], "h1": []}
        self._inside: str | None = None

    def text(self) -> str:
        text = "".join(self._parts)
        text = re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", text)
        text = re.sub(r"[ \t]+\n", "\n", text)
        return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n" if text.strip() else ""

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
            self._parts.append(data)

    def _break(self, tag: str, *, opening: bool) -> None:
        if tag in _PARAGRAPHS:
            self._parts.append("\n\n")
        elif tag == "br" or (tag in _LINES and self._parts and not self._parts[-1].endswith("\n")):
            self._parts.append("\n")
        elif tag in _CELLS and not opening:
            self._parts.append("\t")
        if tag == "li" and opening:
            self._parts.append("- ")
