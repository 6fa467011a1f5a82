"""Vectors of one head in the order they came, in pages on flash: what retrieval without clusters reads.

The last, half filled page stays in memory. Knows nothing of queries.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.decode.flash.cluster_pages import ClusterPages
from kvweave.decode.flash.entry_format import EntryFormat
from kvweave.decode.flash.page_file import PageFile, finish
from kvweave.decode.flash.pools import Extent, Places
from kvweave.decode.flash.runs import PageMemory


class SequencePages:
    """Vectors (n, E) of one head. `form` lays a vector out as an entry of two halves of its width."""

    def __init__(self, file: PageFile, pools: Places, form: EntryFormat, owner: tuple[int, int]) -> None:
        self.form = form
        self.count = 0
        self._file, self._pools, self._owner = file, pools, owner
        self._halves: list[int] = []
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

    def extents(self, pages: Sequence[int]) -> list[Extent]:
        """Where these pages, ascending, lie: those that follow each other in a half as one extent."""
        numbers = np.asarray(pages, np.int64)
        half_pages = self._pools.half_pages
        starts = np.flatnonzero((np.diff(numbers, prepend=-2) != 1) | (numbers % half_pages == 0))
        lengths = np.diff(starts, append=len(numbers))
        return [
            self._place(first, count)
            for first, count in zip(numbers[starts].tolist(), lengths.tolist(), strict=True)
        ]

    def _place(self, page: int, count: int) -> Extent:
        """Pages from `page` on, all of one half."""
        number, at = divmod(page, self._pools.half_pages)
        return self._pools.extent(self._halves[number], at + count).behind(at)

    def _write(self, page: int) -> None:
        if page // self._pools.half_pages == len(self._halves):
            self._halves.append(self._pools.take(self._owner))
        self._pools.reserve(self._halves[-1], page % self._pools.half_pages + 1)
        laid = torch.zeros(self.form.page_bytes, dtype=torch.uint8)
        laid[: self._tail.numel()] = self._tail.flatten()
        self._file.write_copied(self._place(page, 1).first, laid)


def read_pages(
    pages: ClusterPages, memory: PageMemory, wanted: Sequence[tuple[Sequence[Extent], Sequence[int]]]
) -> None:
    """Read pages into frames and wait: for each sequence its pages' extents and the pages' frames. Raises StoreError."""
    extents: list[Extent] = []
    frames: list[Sequence[int]] = []
    for places, own in wanted:
        at = 0
        for extent in places:
            extents.append(extent)
            frames.append(own[at : at + extent.pages])
            at += extent.pages
    finish(pages.file.read(pages.runs(extents, frames, memory)))
