"""What the reader of a format gives: text with its sections, a title, notes, attachments."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kvweave.types import Section

_SURROGATES_OR_NUL: Final = re.compile("[\ud800-\udfff\0]")


class Attachment(NamedTuple):
    """A file inside a file."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Extracted:
    """A file's text; the fields are those of `Document`. `attachments` become documents of their own."""

    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    numbered_lines: bool = False
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What a reader may need beside the bytes.

    Attributes:
        alive: called after each page, sheet, slide, chapter or message: the time limit counts from there.
        known_messages: ids of the e-mails that are indexed anyway; what a reply quotes of them is left out.
    """

    alive: Callable[[], None] = lambda: None
    known_messages: frozenset[str] = field(default=frozenset())


class TextBuilder:
    """Collects text and the sections that it falls into."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self.sections: list[Section] = []

    @property
    def length(self) -> int:
        """Characters so far."""
        return self._length

    def add(self, text: str) -> None:
        """Append text, cleaned of what no tokenizer or database accepts."""
        text = clean(text)
        self._parts.append(text)
        self._length += len(text)

    def mark(self, page: int | None = None, heading: Sequence[str] = (), head: str = "") -> None:
        """Begin a section here."""
        self.sections.append(Section(self._length, page, tuple(map(_one_line, heading)), clean(head)))

    def add_sections(self, text: str, sections: Sequence[Section], path: Sequence[str] = ()) -> None:
        """Append text with its own sections, below the headings `path`."""
        began = self._length
        self.add(text)
        self.sections += [
            replace(each, start=began + each.start, heading=(*map(_one_line, path), *each.heading))
            for each in sections
        ]

    def text(self) -> str:
        """Return everything."""
        return "".join(self._parts)


def clean(text: str) -> str:
    """Join surrogate pairs; replace lone surrogates and NULs by U+FFFD."""
    if not _SURROGATES_OR_NUL.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\0", "\ufffd")


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())[:200]
