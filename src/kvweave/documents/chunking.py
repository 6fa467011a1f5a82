"""Splits a document's text into chunks of limited length, at headings, paragraphs and sentences.

Each chunk is tokenized on its own, so it begins and ends at token boundaries. A chunk's text is copied from the document, not decoded
from token ids, and no text is dropped. Chunks cut from a table or an e-mail repeat its head.
"""

from collections.abc import Callable, Iterator
from typing import Any

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from kvweave.documents.extracted import section_at
from kvweave.documents.files import SPLIT_AS_MARKDOWN, content_suffix
from kvweave.errors import InvalidRequest
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.prompt import PlainTokenizer
from kvweave.types import Chunk, Document, Place

_PATH_SEPARATOR = " > "


class _Sections:
    """The sections of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._sections = sorted(document.sections, key=lambda section: section.start)
        self._counted = (0, 1)  # an offset, and the number of its line

    def place(self, start: int, end: int) -> Place:
        """Return the place of a passage's first word. Calls in reading order are faster."""
        text = self._document.text
        passage = text[start:end]
        first = start + len(passage) - len(passage.lstrip())
        section = section_at(self._sections, min(first, max(start, end - 1)))
        line = self._line(first) if self._document.numbered_lines else None
        return Place(section.page, _PATH_SEPARATOR.join(filter(None, section.heading)), line)

    def head_before(self, offset: int) -> str:
        """Return the head for a chunk that starts at this offset, without lines that the chunk itself starts with."""
        section, text = section_at(self._sections, offset), self._document.text
        if text[section.start : offset].strip():
            return section.head
        lines = section.head.splitlines(keepends=True)
        ends = ("".join(lines[number:]) for number in range(len(lines)))
        held = next((end for end in ends if text.startswith(end, section.start)), "")
        return section.head.removesuffix(held)

    def regions(self, is_long: Callable[[str], bool]) -> Iterator[tuple[int, int, str]]:
        """Yield the parts of the text that are split separately: start, end, and the head to repeat in each chunk.

        Such a part is a long section with a head, or what lies between two of them; then the head is empty.
        """
        text, done = self._document.text, 0
        ends = [
            *(section.start for section in self._sections[1:]),
            len(text),
        ]  # one more than sections if there are none
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
        if offset < known:  # chunks may overlap
            known, number = 0, 1
        number += self._document.text.count("\n", known, offset)
        self._counted = (offset, number)
        return number


MAX_CHARS_PER_TOKEN = 32
"""A chunk has at most this many characters per allowed token: some tokenizers turn a megabyte of base64 into one <unk>."""

BLOCK_CHARS = 100_000
"""Most characters that the splitter gets at once: its time is quadratic in text without line ends."""

Extent = tuple[int, int]


class Chunker:
    """Splits documents for one tokenizer.

    Args:
        tokenizer: the answering model's transformers tokenizer.
        chunk_tokens: most tokens in a chunk, at least 1. A single character that needs more is a chunk all the same.
        overlap_tokens: most tokens that a chunk repeats from the one before it; less than chunk_tokens.

    Raises:
        InvalidRequest: lengths out of range.
    """

    def __init__(self, tokenizer: Any, chunk_tokens: int, overlap_tokens: int = 0) -> None:
        if chunk_tokens < 1:
            raise InvalidRequest(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
        if not 0 <= overlap_tokens < chunk_tokens:
            raise InvalidRequest(
                f"overlap_tokens is {overlap_tokens}; it must be at least 0 and less than chunk_tokens, {chunk_tokens}"
            )
        self.chunk_tokens = chunk_tokens
        self.overlap_tokens = overlap_tokens
        self._plain = PlainTokenizer(tokenizer)
        self._size = _size(self._plain, chunk_tokens)
        self._text = TextSplitter.from_callback(self._size, chunk_tokens, overlap_tokens, trim=False)
        self._markdown = MarkdownSplitter.from_callback(self._size, chunk_tokens, overlap_tokens, trim=False)

    def split(self, document: Document) -> list[Chunk]:
        """Split one document.

        Returns:
            Chunks in reading order, each with at least one token. Without overlap and repeated heads, their joined texts
            are the document's text. A text without tokens has no chunks.
        """
        chunks, sections = [], _Sections(document)
        for start, end, head in self._pieces(document, sections):
            text = head + document.text[start:end]
            ids = self._plain.ids(text)
            where = (document.source, document.digest, start, end, sections.place(start, end))
            chunks.append(Chunk(text, ids, digest_tokens(ids), *where))
        return chunks

    def _pieces(self, document: Document, sections: _Sections) -> Iterator[tuple[int, int, str]]:
        """Yield the start and end of each chunk in the document's text, and the head that it repeats."""
        text, markdown = document.text, content_suffix(document.source) in SPLIT_AS_MARKDOWN
        for first, last, head in sections.regions(self._is_long):
            splitter = self._markdown if markdown else self._text
            if head:
                head = self._shortened(head)
                splitter = self._splitter_behind(head)
            for start, end in self._merged(text, self._extents(text, first, last, splitter, head)):
                repeated = self._shortened(sections.head_before(start))
                for extent in self._fitting(text, start, end, repeated) if repeated else ((start, end),):
                    yield *extent, repeated

    def _is_long(self, text: str) -> bool:
        return self._size(text) > self.chunk_tokens

    def _shortened(self, head: str) -> str:
        """Return a head, cut to at most half of a chunk."""
        while self._size(head) > self.chunk_tokens // 2 and head.strip():
            head = head[: len(head) // 2].rstrip() + "\n" if len(head) > 2 else ""
        return head

    def _splitter_behind(self, head: str) -> TextSplitter:
        """Return a splitter whose pieces leave room for a head; it prefers to cut at line ends."""
        room = max(1, self.chunk_tokens - self._plain.count(head))
        return TextSplitter.from_callback(self._size, room, min(self.overlap_tokens, room - 1), trim=False)

    def _extents(self, text: str, first: int, last: int, splitter: Any, head: str = "") -> Iterator[Extent]:
        for block_start, block_end in blocks(text, first, last):
            for offset, piece in splitter.chunk_indices(text[block_start:block_end]):
                start = block_start + offset
                yield from self._fitting(text, start, start + len(piece), head)

    def _fitting(self, text: str, start: int, end: int, head: str = "") -> Iterator[Extent]:
        """Halve a piece until it fits: a whole may have more tokens than its parts, so the splitter can exceed the limit.

        With a head, cut at the last line end or space before the middle.
        """
        if end - start < 2 or self._size(head + text[start:end]) <= self.chunk_tokens:
            yield start, end
            return
        middle = (start + end) // 2
        if head:
            cuts = (text.rfind(mark, start, middle) + 1 for mark in "\n ")
            middle = next((cut for cut in cuts if cut > start), middle)
        yield from self._fitting(text, start, middle, head)
        yield from self._fitting(text, middle, end, head)

    def _merged(self, text: str, extents: Iterator[Extent]) -> list[Extent]:
        """Join blank pieces to the piece before, and at the document's start to the piece after."""
        merged: list[Extent] = []
        blank_start: int | None = None  # of blank text at the document's start
        for start, end in extents:
            tokens, before = self._plain.count(text[start:end]), merged[-1][0] if merged else start
            fits = not text[start:end].strip() and self._plain.count(text[before:end]) <= self.chunk_tokens
            if merged and (fits or not tokens):
                merged[-1] = (before, end)
            elif tokens:
                merged.append((start if blank_start is None else blank_start, end))
                blank_start = None
            elif blank_start is None:
                blank_start = start
        return merged


def _size(plain: PlainTokenizer, most: int) -> Callable[[str], int]:
    """Return a function that counts a text's tokens; a text that certainly has more than `most` counts as one more.

    The splitters hold this function, and Python cannot free a cycle through them. So it must not refer to the chunker.
    """

    def size(text: str) -> int:
        return most + 1 if len(text) > most * MAX_CHARS_PER_TOKEN else plain.count(text)

    return size


def blocks(text: str, start: int, last: int) -> Iterator[Extent]:
    """Split a part of `text` into blocks of at most BLOCK_CHARS; a block ends after a paragraph, line or word if it can."""
    while last - start > BLOCK_CHARS:
        limit = start + BLOCK_CHARS
        ends = (text.rfind(mark, start + BLOCK_CHARS // 2, limit) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((end for end in ends if end > start + BLOCK_CHARS // 2), limit)
        yield start, end
        start = end
    if start < last:
        yield start, last
