"""A document's sections by offset: where a passage is, and which head it repeats."""

from bisect import bisect_right
from collections.abc import Callable, Iterator

from kvweave.types import Document, Place, Section

_START = Section(0)
_PATH_SEPARATOR = " > "


class Sections:
    """The sections of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._sections = sorted(document.sections, key=lambda section: section.start)
        self._starts = [section.start for section in self._sections]
        self._counted = (0, 1)  # an offset, and the number of its line

    def at(self, offset: int) -> Section:
        """Return the section that an offset is in."""
        number = bisect_right(self._starts, offset) - 1
        return self._sections[number] if number >= 0 else _START

    def place(self, start: int, end: int) -> Place:
        """Return where a passage begins, behind its leading white space. Ask for passages in reading order."""
        text = self._document.text
        passage = text[start:end]
        first = start + len(passage) - len(passage.lstrip())
        section = self.at(min(first, max(start, end - 1)))
        line = self._line(first) if self._document.numbered_lines else None
        return Place(section.page, _PATH_SEPARATOR.join(filter(None, section.heading)), line)

    def head_before(self, offset: int) -> str:
        """Return the head that a chunk from this offset on has to repeat; empty if it begins with the head or needs none."""
        section = self.at(offset)
        begins = not self._document.text[section.start : offset].strip()
        return "" if begins else section.head

    def regions(self, is_long: Callable[[str], bool]) -> Iterator[tuple[int, int, str]]:
        """Yield the parts of the text that are split each on its own: start, end, and the head of a long section with one."""
        text, done = self._document.text, 0
        ends = [*self._starts[1:], len(text)]  # one too many if there is no section
        for section, end in zip(self._sections, ends, strict=False):
            if section.head and is_long(text[section.start : end]):
                if text[done : section.start].strip():
                    yield done, section.start, ""
                    done = section.start
                yield done, end, section.head
                done = end
        if text[done:].strip() or not done:
            yield done, len(text), ""

    def _line(self, offset: int) -> int:
        known, number = self._counted
        if offset < known:  # with overlap, a passage may begin before the one before it ends
            known, number = 0, 1
        number += self._document.text.count("\n", known, offset)
        self._counted = (offset, number)
        return number
