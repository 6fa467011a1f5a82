"""Where each cluster's pages lie in the file, and getting pages there and back.

A cluster is a list of pages in homes that the layout gives out. Knows nothing of what is in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.decode.clusters.table import ClusterTable, Key
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.flash.entry_format import EntryFormat
from kvweave.decode.flash.page_file import AlignedBuffer, PageFile, Run, finish
from kvweave.decode.flash.pools import Extent, Move, Places
from kvweave.decode.flash.runs import PageMemory, joined


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

    def extents(self, key: Key, start: int, end: int) -> list[Extent]:
        """Where pages `start` … `end` − 1 of a cluster lie, in the cluster's order."""
        layer, head, cluster = key
        found = []
        half_pages = self.places.half_pages
        for number, half in enumerate(self.tables[layer].halves(head, cluster)):
            first, last = max(start - number * half_pages, 0), min(end - number * half_pages, half_pages)
            if first < last:
                found.append(self.places.extent(half, last).behind(first))
        return found

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
        for start in range(0, self.form.pages(entries.shape[0]), self.largest_pages):
            some = entries[start * self.form.per_page : (start + self.largest_pages) * self.form.per_page]
            pages = self.form.pages(some.shape[0])
            self.form.lay_out(staging, range(pages), some)
            (extent,) = self.extents(key, start, start + pages)
            if extent.backward:
                staging[:pages] = staging[:pages].flip(0)
            self.file.write(extent.first, [self._buffer.view[: pages * self.form.page_bytes]])

    def write(self, key: Key, memory: PageMemory, frames: Sequence[int], page: int) -> None:
        """Write frames as a cluster's pages from `page` on."""
        at = 0
        for extent in self.extents(key, page, page + len(frames)):
            own = frames[at : at + extent.pages]
            self.file.write(extent.first, memory.views(own[::-1] if extent.backward else own))
            at += extent.pages

    def read(self, key: Key, memory: PageMemory, page: int, frame: int) -> None:
        """Read one page and wait for it."""
        runs = joined(self.extents(key, page, page + 1), [[frame]], memory, self._waste, 0)
        finish(self.file.read(runs))

    def runs(
        self, extents: Sequence[Extent], frames: Sequence[Sequence[int]], memory: PageMemory
    ) -> list[Run]:
        """The runs that bring extents into frames, gaps read through."""
        return joined(extents, frames, memory, self._waste, self.gap_pages)

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
