"""Pages of all clusters in one file: where they are, and reading and writing them.

A cluster is a list of pages in homes that the layout allocates. Knows nothing of what is in memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.cluster_table import ClusterKey, ClusterKeys, ClusterTable, key_array, table_column
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import Layout
from kvweave.decode.disk.page_file import AlignedBuffer, PageFile, PageMemory, Run, merge_runs, wait_for

_NO_BUFFER = memoryview(b"")


class ClusterPages:
    """Reads and writes the pages of all layers' clusters.

    `tables[layer]` has the clusters' sizes and homes; homes are updated here. `largest_pages` is the size of the largest
    cluster that is not yet split. Reads run through gaps of up to `gap_pages`.
    """

    def __init__(
        self,
        file: PageFile,
        entry_format: EntryFormat,
        layout: Layout,
        tables: Sequence[ClusterTable],
        *,
        largest_pages: int,
        gap_pages: int,
    ) -> None:
        self.file = file
        self.entry_format = entry_format
        self.layout = layout
        self.tables = tables
        self.largest_pages = largest_pages
        self.gap_pages = gap_pages
        # A buffer for a cluster to write, then one that gaps are read into: reads may be in flight meanwhile.
        self._buffer = AlignedBuffer((largest_pages + gap_pages) * entry_format.page_bytes)
        self._gap_buffer = self._buffer.view[largest_pages * entry_format.page_bytes :]

    @property
    def buffer_bytes(self) -> int:
        return len(self._buffer.view)

    def page_count(self, key: ClusterKey) -> int:
        """Return the number of a cluster's pages, in memory or not."""
        layer, head, cluster = key
        return self.entry_format.page_count(int(self.tables[layer].sizes[head, cluster]))

    def page_numbers(self, keys: ClusterKeys, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the first `counts` (n,) pages of clusters are in the file, one cluster after another."""
        pages = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        homes = np.repeat(table_column("homes", self.tables, keys), counts)
        home_pages = self.layout.home_pages
        if counts.max(initial=0) > home_pages:
            ends = np.cumsum(counts)
            for index in np.flatnonzero(
                counts > home_pages
            ).tolist():  # clusters that outgrew their first home
                layer, head, cluster = key_array(keys)[index].tolist()
                own = np.array(self.tables[layer].homes_of(head, cluster))
                part = slice(ends[index] - counts[index], ends[index])
                homes[part] = own[pages[part] // home_pages]
        return self.layout.page_numbers(homes, pages % home_pages)

    def reserve(self, key: ClusterKey, pages: int) -> None:
        """Allocate or free homes for a number of pages."""
        layer, head, cluster = key
        table, layout = self.tables[layer], self.layout
        extra = table.extra_homes.setdefault((head, cluster), [])
        needed = -(-pages // layout.home_pages) - 1
        while len(extra) < needed:
            extra.append(layout.allocate((layer, head)))
        while len(extra) > max(0, needed):
            layout.free((layer, head), extra.pop())
        if not extra:
            del table.extra_homes[head, cluster]

    def write_new(self, key: ClusterKey, entries: Tensor) -> None:
        """Write all entries (n, E) of a cluster, whose pages are reserved, without using frames."""
        page_bytes, page_entries = self.entry_format.page_bytes, self.entry_format.page_entries
        staging = torch.frombuffer(self._buffer.view, dtype=torch.uint8).view(-1, page_bytes)
        numbers = self._numbers_of(key, 0, self.entry_format.page_count(entries.shape[0]))
        for start in range(0, len(numbers), self.largest_pages):
            end = start + self.largest_pages
            own = numbers[start:end]
            # Pages of one home, which may run backward: staged in the order of the file.
            part = entries[start * page_entries : end * page_entries]
            self.entry_format.fill_pages(staging, (own - own.min()).tolist(), part)
            self.file.write(int(own.min()), [self._buffer.view[: len(own) * page_bytes]])

    def write_first(self, key: ClusterKey, memory: PageMemory, frames: Sequence[int]) -> None:
        self._write(self._numbers_of(key, 0, len(frames)), memory, frames)

    def write_last(self, keys: ClusterKeys, memory: PageMemory, frames: Sequence[int]) -> None:
        """Write frames as the last pages of clusters, one of each."""
        counts = self.entry_format.page_count(table_column("sizes", self.tables, keys))
        self._write(self.page_numbers(keys, counts)[np.cumsum(counts) - 1], memory, frames)

    def read_page(self, key: ClusterKey, memory: PageMemory, page: int, frame: int) -> None:
        """Read one page of a cluster and wait for it. Raises StoreError."""
        self.read_pages(self._numbers_of(key, page, page + 1), np.array([frame]), memory)

    def read_pages(self, numbers: NDArray[np.int64], frames: NDArray[np.int64], memory: PageMemory) -> None:
        """Read pages of the file into frames and wait for them. Raises StoreError."""
        wait_for(self.file.read(self.runs(numbers, frames, memory)))

    def runs(self, numbers: NDArray[np.int64], frames: NDArray[np.int64], memory: PageMemory) -> list[Run]:
        """Return the runs that read pages of the file into frames, gaps included."""
        return merge_runs(numbers, frames, memory, self._gap_buffer, self.gap_pages)

    def _write(self, numbers: NDArray[np.int64], memory: PageMemory, frames: Sequence[int]) -> None:
        """Write frames as these pages of the file, with one write per run."""
        for run in merge_runs(numbers, np.array(frames, np.int64), memory, _NO_BUFFER, 0):
            self.file.write(run.first, run.buffers)

    def _numbers_of(self, key: ClusterKey, start: int, end: int) -> NDArray[np.int64]:
        """Return where pages `start` … `end` − 1 of a cluster are."""
        return self.page_numbers([key], np.array([end]))[start:]
