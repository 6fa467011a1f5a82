"""Vectors of one head in the order they came, in pages on flash: what retrieval without clusters reads.

The last, half filled page stays in memory. Knows nothing of queries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import Places
from kvweave.decode.disk.page_file import PageFile
from kvweave.errors import StoreError


class SequencePages:
    """Vectors (n, E) of one head. `form` lays a vector out as an entry of two halves of its width."""

    def __init__(self, file: PageFile, pools: Places, form: EntryFormat, owner: tuple[int, int]) -> None:
        self.form = form
        self.count = 0
        self._file, self._pools, self._owner = file, pools, owner
        self._halves: list[int] = []
        self._sums: list[int] = []  # of each full page's words, as a signed 64-bit number
        self._tail = torch.zeros(form.per_page, form.bytes, dtype=torch.uint8)

    @property
    def resident_bytes(self) -> int:
        """What the last page takes."""
        return self._tail.nbytes

    @property
    def pages(self) -> int:
        """Full pages, on flash."""
        return self.count // self.form.per_page

    def append(self, vectors: Tensor) -> None:
        """Add encoded vectors (n, E)."""
        start = 0
        while start < vectors.shape[0]:
            slot = self.count % self.form.per_page
            some = vectors[start : start + self.form.per_page - slot]
            self._tail[slot : slot + some.shape[0]] = some
            self.count += some.shape[0]
            start += some.shape[0]
            if slot + some.shape[0] == self.form.per_page:
                self._write(self.pages - 1)

    def tail(self) -> Tensor:
        """The vectors (n, E) of the last page, which is not full; to be read only."""
        return self._tail[: self.count % self.form.per_page]

    def numbers(self, pages: Sequence[int]) -> NDArray[np.int64]:
        """Where these pages lie in the file."""
        wanted, half_pages = np.asarray(pages, np.int64), self._pools.half_pages
        return self._pools.numbers(
            np.asarray(self._halves, np.int64)[wanted // half_pages], wanted % half_pages
        )

    def check(self, pages: Sequence[int], read: Tensor) -> None:
        """Raise StoreError unless `read` (n, page bytes) is what was written as these pages."""
        sums = read.view(torch.int64).sum(1)
        wrong = torch.nonzero(sums != torch.tensor([self._sums[page] for page in pages], dtype=torch.int64))
        if wrong.numel():
            raise StoreError(
                f"page {pages[int(wrong[0])]} of layer {self._owner[0]}, head {self._owner[1]} was read and is not what was"
                " written; start again from the text"
            )

    def _write(self, page: int) -> None:
        if page // self._pools.half_pages == len(self._halves):
            self._halves.append(self._pools.take(self._owner))
        self._pools.reserve(self._halves[-1], page % self._pools.half_pages + 1)
        laid = torch.zeros(self.form.page_bytes, dtype=torch.uint8)
        laid[: self._tail.numel()] = self._tail.flatten()
        self._sums.append(int(laid.view(torch.int64).sum()))
        self._file.write_copied(int(self.numbers([page])[0]), laid)
