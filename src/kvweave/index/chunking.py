"""A document's text, cut into chunks of at most so many tokens, at headings, paragraphs and sentences.

Boundaries are token boundaries by construction: each chunk is tokenized on its own. Nothing is dropped, and
text always comes from the document, never from decoding ids. Does not know where chunks go.
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
"""The splitter sees a long text in blocks of this length: without line ends its time grows with the square."""

Extent = tuple[int, int]


class Chunker:
    """Cuts documents for one tokenizer.

    Args:
        tokenizer: the answering model's transformers tokenizer.
        chunk_tokens: most tokens a chunk may have, at least 1. (A single character that needs more is kept.)
        overlap_tokens: up to how many tokens a chunk repeats of the one before it; less than chunk_tokens.

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
        """Cut one document.

        Returns:
            Chunks in reading order. Without overlap their texts, joined, are the document's text. Each has at
            least one token: a text without any has no chunks.
        """
        chunks = []
        for start, end in self._merged(document.text, self._extents(document)):
            text = document.text[start:end]
            ids = self._plain.ids(text)
            chunks.append(Chunk(text, ids, digest_tokens(ids), document.source, document.digest, start, end))
        return chunks

    def _size(self, text: str) -> int:
        """Length of `text` in tokens, or one more than allowed where counting would only confirm that."""
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
        """Halve what is still too long. Splitters promise that nothing is; tokenizers are not additive."""
        if end - start < 2 or self._size(text[start:end]) <= self.chunk_tokens:
            yield start, end
            return
        middle = (start + end) // 2
        yield from self._fitting(text, start, middle)
        yield from self._fitting(text, middle, end)

    def _merged(self, text: str, extents: Iterator[Extent]) -> list[Extent]:
        """Give blank pieces to the neighbour before, or after at the start: alone they say nothing."""
        merged: list[Extent] = []
        waiting: int | None = None  # where blank text at the document's start began
        for start, end in extents:
            tokens = self._plain.count(text[start:end])
            if merged and self._joins(text, merged[-1], (start, end), tokens):
                merged[-1] = (merged[-1][0], end)
            elif tokens:
                merged.append((start if waiting is None else waiting, end))
                waiting = None
            elif waiting is None:
                waiting = start
        return merged

    def _joins(self, text: str, before: Extent, piece: Extent, tokens: int) -> bool:
        if tokens == 0:
            return True
        if text[slice(*piece)].strip():
            return False
        return self._plain.count(text[before[0] : piece[1]]) <= self.chunk_tokens


def _blocks(text: str) -> Iterator[Extent]:
    """Cover `text` with blocks of at most BLOCK_CHARS, cut at the last paragraph, line or word end in each."""
    start = 0
    while len(text) - start > BLOCK_CHARS:
        limit = start + BLOCK_CHARS
        ends = (text.rfind(mark, start + BLOCK_CHARS // 2, limit) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((end for end in ends if end > start + BLOCK_CHARS // 2), limit)
        yield start, end
        start = end
    if start < len(text):
        yield start, len(text)
