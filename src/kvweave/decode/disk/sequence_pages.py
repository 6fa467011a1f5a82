"""Vectors of one head in the order of the text, in pages on disk, for retrieval without clusters.

The last, half-filled page stays in memory. Knows nothing of queries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import Layout, Owner
from kvweave.decode.disk.page_file import PageFile
from kvweave.errors import StoreError


class SequencePages:
    """Encoded vectors (n, E) of one head; `entry_format` encodes a vector as an entry of two halves."""

    def __init__(self, file: PageFile, layout: Layout, entry_format: EntryFormat, owner: Owner) -> None:
        self.entry_format = entry_format
        self.count = 0
        self._file, self._layout, self._owner = file, layout, owner
        self._homes: list[int] = []
        self._checksums: list[int] = []  # of each full page: the sum of its words, signed
        self._tail = torch.zeros(entry_format.page_entries, entry_format.entry_bytes, dtype=torch.uint8)

    @property
    def resident_bytes(self) -> int:
        """Memory of the last page."""
        return self._tail.nbytes

    @property
    def pages(self) -> int:
        """Number of full pages, which are on disk."""
        return self.count // self.entry_format.page_entries

    def append(self, vectors: Tensor) -> None:
        """Append encoded vectors (n, E)."""
        page_entries = self.entry_format.page_entries
        start = 0
        while start < vectors.shape[0]:
            slot = self.count % page_entries
            some = vectors[start : start + page_entries - slot]
            self._tail[slot : slot + some.shape[0]] = some
            self.count += some.shape[0]
            start += some.shape[0]
            if slot + some.shape[0] == page_entries:
                self._write(self.pages - 1)

    def tail(self) -> Tensor:
        """Return the vectors (n, E) of the half-filled last page; read-only."""
        return self._tail[: self.count % self.entry_format.page_entries]

    def page_numbers(self, pages: Sequence[int]) -> NDArray[np.int64]:
        """Return where these pages are in the file."""
        numbers, home_pages = np.asarray(pages, np.int64), self._layout.home_pages
        homes = np.asarray(self._homes, np.int64)[numbers // home_pages]
        return self._layout.page_numbers(homes, numbers % home_pages)

    def check(self, pages: Sequence[int], content: Tensor) -> None:
        """Raise StoreError unless `content` (n, page bytes) is what was written as these pages."""
        sums = content.view(torch.int64).sum(1)
        expected = torch.tensor([self._checksums[page] for page in pages], dtype=torch.int64)
        wrong = torch.nonzero(sums != expected)
        if wrong.numel():
            layer, head = self._owner
            raise StoreError(
                f"page {pages[int(wrong[0])]} of layer {layer}, head {head} was read and is not what was written; start "
                "again from the text"
            )

    def _write(self, page: int) -> None:
        """Write the last page, which is full."""
        if page // self._layout.home_pages == len(self._homes):
            self._homes.append(self._layout.allocate(self._owner))
        self._layout.reserve(self._homes[-1], page % self._layout.home_pages + 1)
        content = torch.zeros(self.entry_format.page_bytes, dtype=torch.uint8)
        content[: self._tail.numel()] = self._tail.flatten()
        self._checksums.append(int(content.view(torch.int64).sum()))
        self._file.write_page(int(self.page_numbers([page])[0]), content)
