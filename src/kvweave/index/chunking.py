"""Splits a document's text into chunks of limited length, at headings, paragraphs and sentences.

Boundaries are token boundaries by construction: each chunk is tokenized on its own. Nothing is dropped, and the text
always comes from the document, never from decoding ids. Does not know where chunks are stored.
"""

from collections.abc import Iterator
from typing import Any

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from kvweave.errors import InvalidRequest
from kvweave.index.file_types import MARKDOWN, content_suffix
from kvweave.kvstore.keys import digest_tokens
from kvweave.models.prompt import PlainTokenizer
from kvweave.types import Chunk, Document

MAX_CHARS_PER_TOKEN = 32
"""A chunk holds at most this many characters per allowed token: a megabyte of base64 may be one <unk>."""

BLOCK_CHARS = 100_000
"""The splitter gets a long text in blocks of this length: in text without line ends its time is quadratic."""

Extent = tuple[int, int]


class Chunker:
    """Splits documents for one tokenizer.

    Args:
        tokenizer: the answering model's transformers tokenizer.
        chunk_tokens: most tokens in a chunk, at least 1. (A single character that needs more is kept.)
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
        self._text = TextSplitter.from_callback(self._size, chunk_tokens, overlap_tokens, trim=False)
        self._markdown = MarkdownSplitter.from_callback(self._size, chunk_tokens, overlap_tokens, trim=False)

    def split(self, document: Document) -> list[Chunk]:
        """Split one document.

        Returns:
            Chunks in reading order. Without overlap, their texts joined are the document's text. Each has at least one
            token: a text without tokens has no chunks.
        """
        chunks = []
        for start, end in self._merged(document.text, self._extents(document)):
            text = document.text[start:end]
            ids = self._plain.ids(text)
            chunks.append(Chunk(text, ids, digest_tokens(ids), document.source, document.digest, start, end))
        return chunks

    def _size(self, text: str) -> int:
        """Return the length of `text` in tokens, or one more than allowed if the text is certainly too long."""
        if len(text) > self.chunk_tokens * MAX_CHARS_PER_TOKEN:
            return self.chunk_tokens + 1
        return self._plain.count(text)

    def _extents(self, document: Document) -> Iterator[Extent]:
        splitter = self._markdown if content_suffix(document.source) in MARKDOWN else self._text
        for block_start, block_end in _blocks(document.text):
            for offset, piece in splitter.chunk_indices(document.text[block_start:block_end]):
                start = block_start + offset
                yield from self._fitting(document.text, start, start + len(piece))

    def _fitting(self, text: str, start: int, end: int) -> Iterator[Extent]:
        """Halve a piece that is still too long: tokenizers are not additive, so the splitter can miss the limit."""
        if end - start < 2 or self._size(text[start:end]) <= self.chunk_tokens:
            yield start, end
            return
        middle = (start + end) // 2
        yield from self._fitting(text, start, middle)
        yield from self._fitting(text, middle, end)

    def _merged(self, text: str, extents: Iterator[Extent]) -> list[Extent]:
        """Join blank pieces to the piece before; at the document's start, to the piece after."""
        merged: list[Extent] = []
        blank_start: int | None = None  # of blank text at the document's start
        for start, end in extents:
            tokens = self._plain.count(text[start:end])
            if merged and self._joins(text, merged[-1], (start, end), tokens):
                merged[-1] = (merged[-1][0], end)
            elif tokens:
                merged.append((start if blank_start is None else blank_start, end))
                blank_start = None
            elif blank_start is None:
                blank_start = start
        return merged

    def _joins(self, text: str, before: Extent, piece: Extent, tokens: int) -> bool:
        """Return whether a piece has no content of its own and fits into the chunk before."""
        if tokens == 0:
            return True
        if text[slice(*piece)].strip():
            return False
        return self._plain.count(text[before[0] : piece[1]]) <= self.chunk_tokens


def _blocks(text: str) -> Iterator[Extent]:
    """Split `text` into blocks of at most BLOCK_CHARS, each ending at its last paragraph, line or word end."""
    start = 0
    while len(text) - start > BLOCK_CHARS:
        limit = start + BLOCK_CHARS
        ends = (text.rfind(mark, start + BLOCK_CHARS // 2, limit) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((end for end in ends if end > start + BLOCK_CHARS // 2), limit)
        yield start, end
        start = end
    if start < len(text):
        yield start, len(text)
