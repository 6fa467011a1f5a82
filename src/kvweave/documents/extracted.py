"""The values that readers of formats take and return."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from kvweave.errors import MissingExtra, UnreadableDocument, is_of_library
from kvweave.types import Section

_SURROGATES_OR_NUL: Final = re.compile("[\ud800-\udfff\0]")


class Attachment(NamedTuple):
    """A file inside a file."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Extracted:
    """A file's text; its fields mean the same as those of `Document`. Each attachment becomes a document."""

    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    numbered_lines: bool = False
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What a reader may need beside the file's bytes.

    Attributes:
        alive: the reader calls it after each page, sheet, slide, chapter or message, which starts the time limit again.
        known_messages: the files of e-mails that are indexed themselves, by id. What replies quote of them is left out.
    """

    alive: Callable[[], None] = lambda: None
    known_messages: Mapping[str, Path] = field(default_factory=dict)


class TextBuilder:
    """Collects a document's text and its sections."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.length = 0  # characters so far
        self.sections: list[Section] = []

    def add(self, text: str) -> None:
        """Append text; see `clean` for what it replaces."""
        text = clean(text)
        self._parts.append(text)
        self.length += len(text)

    def mark(self, page: int | None = None, heading: Sequence[str] = (), head: str = "") -> None:
        """Begin a section here."""
        self.sections.append(Section(self.length, page, tuple(map(_one_line, heading)), clean(head)))

    def add_sections(self, text: str, sections: Sequence[Section], path: Sequence[str] = ()) -> None:
        """Append text with its own sections, below the headings `path`."""
        began = self.length
        self.add(text)
        self.sections += [
            replace(each, start=began + each.start, heading=(*map(_one_line, path), *each.heading))
            for each in sections
        ]

    def text(self) -> str:
        """Return all text so far."""
        return "".join(self._parts)


def clean(text: str) -> str:
    """Join surrogate pairs; replace lone surrogates and NULs, which tokenizers and databases reject, by U+FFFD."""
    if not _SURROGATES_OR_NUL.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined.replace("\0", "\ufffd")


def reason(error: BaseException) -> str:
    """Return the kind and message of a library's error on one line; XML parsers quote the file, which may be long."""
    return f"{type(error).__name__}: {' '.join(clean(str(error)).split())}"[:200]


@contextmanager
def damaged(kind: str) -> Iterator[None]:
    """Turn any error that a library raises for a damaged file into UnreadableDocument. Also a decorator."""
    try:
        yield
    except (UnreadableDocument, MissingExtra, MemoryError):
        raise
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise UnreadableDocument(f"damaged {kind} ({reason(error)})") from error


def without(removed: re.Pattern[str], text: str) -> tuple[str, Callable[[int], int]]:
    """Return a text without what a pattern matches, and a function that gives the new offset for an old one."""
    cuts = [each.span() for each in removed.finditer(text)]
    starts, totals = [start for start, _ in cuts], [0, *accumulate(end - start for start, end in cuts)]

    def moved(offset: int) -> int:
        before = bisect_left(starts, offset)
        return max(offset - totals[before], starts[before - 1] - totals[before - 1] if before else 0)

    return removed.sub("", text) if cuts else text, moved


def section_at(sections: Sequence[Section], offset: int) -> Section:
    """Return the section around an offset, from sections in reading order."""
    before = bisect_right(sections, offset, key=lambda each: each.start)
    return sections[before - 1] if before else Section(0)


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())[:200]
