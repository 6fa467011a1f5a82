"""Reads EPUB books with the standard library. The chapters have the order of the spine."""

import io
import posixpath
import zipfile
from typing import Final
from urllib.parse import unquote
from xml.etree import ElementTree

from kvweave.documents.encodings import decode
from kvweave.documents.extracted import Extracted, ReadContext, TextBuilder
from kvweave.documents.formats.office import check_container
from kvweave.documents.html import read_html
from kvweave.errors import UnreadableDocument

_CONTAINER: Final = "META-INF/container.xml"
_PAGES: Final = frozenset({"application/xhtml+xml", "text/html"})


def read_epub(data: bytes, ctx: ReadContext) -> Extracted:
    """Read a book; the headings of its chapters become those of the sections.

    Raises UnreadableDocument for a damaged book and for one with copy protection.
    """
    check_container(data, "epub")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as book:
            if "META-INF/rights.xml" in book.namelist() or "META-INF/license.lcpl" in book.namelist():
                raise UnreadableDocument("EPUB with copy protection (DRM)")
            title, chapters = _chapters(book)
            built, notes = TextBuilder(), list[str]()
            for name in chapters:
                markup, note = decode(book.read(name))
                notes += [f"{name}: {note}"] if note else []
                page = read_html(markup)
                built.add_sections(page.text + "\n" if page.text else "", page.sections)
                ctx.alive()
    except (KeyError, zipfile.BadZipFile, ElementTree.ParseError, NotImplementedError) as error:
        raise UnreadableDocument(f"damaged EPUB ({type(error).__name__}: {error})") from error
    return Extracted(built.text(), title, tuple(built.sections), tuple(notes))


def _chapters(book: zipfile.ZipFile) -> tuple[str, list[str]]:
    """Return the book's title, and the names of its pages in reading order."""
    container = ElementTree.fromstring(book.read(_CONTAINER))
    root = container.find(".//{*}rootfile")
    if root is None:
        raise UnreadableDocument("damaged EPUB (no package document)")
    package_name = unquote(root.get("full-path", ""))
    package = ElementTree.fromstring(book.read(package_name))
    folder = posixpath.dirname(package_name)
    items = {
        item.get("id", ""): posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in package.iterfind(".//{*}manifest/{*}item")
        if item.get("media-type") in _PAGES
    }
    spine = [each.get("idref", "") for each in package.iterfind(".//{*}spine/{*}itemref")]
    title = package.findtext(".//{http://purl.org/dc/elements/1.1/}title") or ""
    present = set(book.namelist())
    return " ".join(title.split()), [items[each] for each in spine if items.get(each) in present]
