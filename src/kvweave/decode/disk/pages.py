"""Where each cluster's pages lie in the file, and getting pages there and back.

A cluster is a list of pages in homes that the layout gives out. Knows nothing of what is in memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import ClusterTable, Key, Keys, as_keys, column
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import Move, Places
from kvweave.decode.disk.page_file import AlignedBuffer, PageFile, PageMemory, Run, finish, joined

_NOTHING = memoryview(b"")


class ClusterPages:
    """The pages of all layers' clusters in one file.

    `tables[layer]` says where a cluster's homes are and is kept up to date. `largest_pages` is what the largest cluster
    takes that is not yet split; `gap_pages` what a read may run through.
    """

    def __init__(
        self,
        file: PageFile,
        form: EntryFormat,
        places: Places,
        tables: Sequence[ClusterTable],
        counts: DecodeCounts,
        *,
        largest_pages: int,
        gap_pages: int,
    ) -> None:
        self.file = file
        self.form = form
        self.places = places
        self.tables = tables
        self.largest_pages = largest_pages
        self.gap_pages = gap_pages
        self._counts = counts
        # A cluster on its way to flash, and behind it what gaps are read into: reads may be under way meanwhile.
        self._buffer = AlignedBuffer((largest_pages + gap_pages) * form.page_bytes)
        self._waste = self._buffer.view[largest_pages * form.page_bytes :]

    @property
    def buffer_bytes(self) -> int:
        """Memory that writing and reading through gaps take."""
        return len(self._buffer.view)

    def pages_of(self, key: Key) -> int:
        """Pages that a cluster takes, in memory or not."""
        layer, head, cluster = key
        return self.form.pages(int(self.tables[layer].sizes[head, cluster]))

    def numbers(self, keys: Keys, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the first `counts` (n,) pages of clusters lie in the file, one cluster after the other."""
        pages = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        homes = np.repeat(column("homes", self.tables, keys), counts)
        half_pages = self.places.half_pages
        if counts.max(initial=0) > half_pages:
            ends = np.cumsum(counts)
            for index in np.flatnonzero(counts > half_pages).tolist():  # those that outgrew their first home
                layer, head, cluster = as_keys(keys)[index].tolist()
                own = np.array(self.tables[layer].halves(head, cluster))
                some = slice(ends[index] - counts[index], ends[index])
                homes[some] = own[pages[some] // half_pages]
        return self.places.numbers(homes, pages % half_pages)

    def reserve(self, key: Key, pages: int) -> list[Move]:
        """Have as many homes as so many pages need, no more. What is returned must be moved before they are written."""
        layer, head, cluster = key
        table, places = self.tables[layer], self.places
        more = table.more.setdefault((head, cluster), [])
        needed = -(-pages // places.half_pages) - 1
        while len(more) < needed:
            more.append(places.take((layer, head)))
        while len(more) > max(0, needed):
            places.give((layer, head), more.pop())
        if not more:
            del table.more[head, cluster]
        return places.reserve(table.halves(head, cluster)[-1], pages)

    def write_new(self, key: Key, entries: Tensor) -> None:
        """Write all of a cluster's entries (n, E) straight to flash; there must be room."""
        staging = torch.frombuffer(self._buffer.view, dtype=torch.uint8).view(-1, self.form.page_bytes)
        numbers = self._of(key, 0, self.form.pages(entries.shape[0]))
        for start in range(0, len(numbers), self.largest_pages):
            some = entries[start * self.form.per_page : (start + self.largest_pages) * self.form.per_page]
            own = numbers[start : start + self.largest_pages]
            # Pages of one home, which may run backward: laid out as they lie in the file.
            self.form.lay_out(staging, (own - own.min()).tolist(), some)
            self.file.write(int(own.min()), [self._buffer.view[: len(own) * self.form.page_bytes]])

    def write_whole(self, key: Key, memory: PageMemory, frames: Sequence[int]) -> None:
        """Write frames as a cluster's first pages."""
        self._write(self._of(key, 0, len(frames)), memory, frames)

    def write_last(self, keys: Keys, memory: PageMemory, frames: Sequence[int]) -> None:
        """Write frames as the last pages of clusters, one of each."""
        counts = self.form.pages(column("sizes", self.tables, keys))
        self._write(self.numbers(keys, counts)[np.cumsum(counts) - 1], memory, frames)

    def read(self, key: Key, memory: PageMemory, page: int, frame: int) -> None:
        """Read one page and wait for it."""
        self.read_all(self._of(key, page, page + 1), np.array([frame]), memory)

    def read_all(self, numbers: NDArray[np.int64], frames: NDArray[np.int64], memory: PageMemory) -> None:
        """Read pages of the file into frames and wait. Raises StoreError."""
        finish(self.file.read(self.runs(numbers, frames, memory)))

    def runs(self, numbers: NDArray[np.int64], frames: NDArray[np.int64], memory: PageMemory) -> list[Run]:
        """The runs that bring pages of the file into frames, gaps read through."""
        return joined(numbers, frames, memory, self._waste, self.gap_pages)

    def move(self, moves: Sequence[Move]) -> None:
        """Move pages on, the last ones first, through the write buffer; nothing may be read meanwhile."""
        page_bytes = self.form.page_bytes
        for move in moves:
            end = min(
                move.first + move.pages, self.file.length_bytes // page_bytes
            )  # beyond it nothing is written
            while end > move.first:
                start = max(move.first, end - self.largest_pages)
                part = self._buffer.view[: (end - start) * page_bytes]
                finish(self.file.read([Run(start, end - start, (part,))]))
                self.file.write(start - move.first + move.to, [part])
                self._counts.moved_bytes += len(part)
                end = start

    def _write(self, numbers: NDArray[np.int64], memory: PageMemory, frames: Sequence[int]) -> None:
        """Write frames as these pages of the file, in as few writes as there are runs."""
        for run in joined(numbers, np.array(frames, np.int64), memory, _NOTHING, 0):
            self.file.write(run.first, run.parts)

    def _of(self, key: Key, start: int, end: int) -> NDArray[np.int64]:
        """Where pages `start` … `end` − 1 of a cluster lie."""
        return self.numbers([key], np.array([end]))[start:]
