"""Centroids of all clusters: on disk, with one layer's at a time in memory (DynaKV §6.1).

A layer's centroids are read when its attention begins and released when it is done. Changed rows are held back until
there are several, then written with their pages. On disk and in memory they are (C, G, D) float32, so that a layer is one
run, whatever its number of clusters. A checksum over a layer's pages is verified on reading. Knows nothing of scores or
entries.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvweave.decode.disk.page_file import AlignedBuffer, PageFile, Run, wait_for
from kvweave.decode.strategy import SharedIndex
from kvweave.errors import StoreError

SPARE_COLUMNS = 32  # room for clusters created while a layer's centroids are in memory
_UNWRITTEN_COLUMNS = 8  # changed rows held back, in units of one row per head


@dataclass(slots=True)
class _LayerCentroids:
    """One layer: `columns` clusters in all, `written` of them on disk, `changed` rows, and the memory while it is loaded.

    `checksum` is the XXH3-64 of the pages that hold the written columns.
    """

    columns: int = 0
    written: int = 0
    checksum: int = 0
    first_page: int = 0
    pages: int = 0
    changed: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by head and cluster, (D,)
    memory: Tensor | None = None  # (capacity, G, D)
    buffer: AlignedBuffer | None = None
    reads: "list[Future[None]]" = field(default_factory=list)
    ready: bool = False  # the reads are done, and changed rows are in place


class Centroids(SharedIndex):
    """Centroids of all layers for G heads of width D, in a file of their own; `split_bytes` are kept free for the copies of a split."""

    def __init__(self, layers: int, heads: int, width: int, file: PageFile, split_bytes: int = 0) -> None:
        self._heads, self._width = heads, width
        self._file, self._split_bytes = file, split_bytes
        self.layers = [_LayerCentroids() for _ in range(layers)]
        self._end_page = 0

    @property
    def resident_bytes(self) -> int:
        """Memory in use, and memory reserved for changed rows and for the largest layer."""
        reserved_rows = (_UNWRITTEN_COLUMNS + 1) * self._heads
        rows = sum(max(len(own.changed), reserved_rows) for own in self.layers)
        return rows * self._width * 4 + max(self._loaded_bytes, self._largest_bytes) + self._split_bytes

    @property
    def growth_bytes(self) -> int:
        """What a split needs in addition, and new clusters."""
        return max(self.bytes_to_put(layer, SPARE_COLUMNS + 1, 2) for layer in range(len(self.layers)))

    def bytes_to_put(self, layer: int, clusters: int, rows: int) -> int:
        """Return the extra memory needed to load a layer and to put `clusters` more clusters and `rows` changed rows.

        Memory that is too small is released only after the copy.
        """
        own = self.layers[layer]
        spare_rows = max(0, (_UNWRITTEN_COLUMNS + 1) * self._heads - len(own.changed))
        changed = max(0, rows - spare_rows) * self._width * 4
        columns = own.columns + clusters
        loaded = self._loaded_bytes
        capacity, length = self._capacity(own.columns)
        if own.memory is None:
            loaded += length
        else:
            capacity = own.memory.shape[0]
        if columns > capacity:
            loaded += self._capacity(columns)[1]
        after = max(loaded, self._largest_bytes, self._capacity(columns)[1])
        return changed + after - max(self._loaded_bytes, self._largest_bytes)

    def prefetch(self, layer: int) -> None:
        """Start reading a layer's centroids without waiting, unless they are loaded or being read."""
        own = self.layers[layer]
        if own.memory is not None:
            return
        capacity, length = self._capacity(own.columns)
        own.buffer = AlignedBuffer(length)
        own.memory = self._rows_of(own.buffer, capacity)
        pages = self._page_count(own.written)
        if pages:
            part = own.buffer.view[: pages * self._file.page_bytes]
            own.reads = self._file.read([Run(own.first_page, pages, (part,))])

    def get(self, layer: int) -> Tensor:
        """Return a layer's centroids (G, C, D), read-only; waits for reads. They stay loaded until `release`.

        Raises StoreError if they cannot be read or do not match their checksum.
        """
        own = self.layers[layer]
        self.prefetch(layer)
        assert own.memory is not None
        if not own.ready:
            wait_for(own.reads)
            if own.reads and self._checksum(own, own.written) != own.checksum:
                raise StoreError(
                    f"the centroids of layer {layer} were read and are not what was written; start again from the text"
                )
            for (head, cluster), row in own.changed.items():
                own.memory[cluster, head] = row
            own.reads, own.ready = [], True
        return own.memory[: own.columns].transpose(0, 1)

    def make_room(self, layer: int, clusters: int) -> None:
        """Load a layer with memory for `clusters` more clusters, so that its centroids are not copied for each few."""
        self.get(layer)
        self._widen(self.layers[layer], self.layers[layer].columns + clusters)

    def put(self, layer: int, head: int, cluster: int, row: Tensor) -> None:
        """Set the centroid (D,) of an old or new cluster."""
        self.get(layer)
        own = self.layers[layer]
        if cluster >= own.columns:
            self._widen(own, cluster + 1)
            own.columns = cluster + 1
        assert own.memory is not None
        own.memory[cluster, head] = row
        own.changed[head, cluster] = row.clone()

    def release(self, layer: int, *, write: bool = False) -> None:
        """Release a layer's memory, writing changed rows if there are many; `write` writes them in any case."""
        own = self.layers[layer]
        if write and own.changed:
            self.prefetch(layer)
        if own.memory is None:
            return
        self.get(layer)  # reads must be done before their memory is released
        if own.changed and (write or len(own.changed) > _UNWRITTEN_COLUMNS * self._heads):
            self._write(own)
        own.memory = own.buffer = None
        own.ready = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def _loaded_bytes(self) -> int:
        return sum(len(own.buffer.view) for own in self.layers if own.buffer is not None)

    @property
    def _largest_bytes(self) -> int:
        return self._capacity(max((own.columns for own in self.layers), default=0))[1]

    def _capacity(self, columns: int) -> tuple[int, int]:
        """Return the columns to allocate for `columns`, spare ones included, and their bytes."""
        capacity = columns + SPARE_COLUMNS
        length = capacity * self._heads * self._width * 4
        unit = self._file.page_bytes
        return capacity, -(-length // unit) * unit

    def _page_count(self, columns: int) -> int:
        return -(-columns * self._heads * self._width * 4 // self._file.page_bytes)

    def _rows_of(self, buffer: AlignedBuffer, capacity: int) -> Tensor:
        """Return the first `capacity` columns of a buffer as (capacity, G, D)."""
        numbers = torch.frombuffer(buffer.view, dtype=torch.float32)
        return numbers[: capacity * self._heads * self._width].view(capacity, self._heads, self._width)

    def _widen(self, own: _LayerCentroids, columns: int) -> None:
        """Allocate more memory if this many columns need it."""
        assert own.memory is not None
        if columns <= own.memory.shape[0]:
            return
        capacity, length = self._capacity(columns)
        buffer = AlignedBuffer(length)
        memory = self._rows_of(buffer, capacity)
        memory[: own.memory.shape[0]] = own.memory
        own.memory, own.buffer = memory, buffer

    def _write(self, own: _LayerCentroids) -> None:
        """Write the pages of changed rows, or all pages to a new place if the layer has outgrown its old one."""
        assert own.buffer is not None
        needed = self._page_count(own.columns)
        page_bytes = self._file.page_bytes
        if needed > own.pages:
            own.first_page, own.pages = self._end_page, 2 * needed
            self._end_page += own.pages
            self._file.write(own.first_page, [own.buffer.view[: needed * page_bytes]])
        else:
            # All pages of new columns, also rows of heads without such a cluster: unwritten disk does not read as zero.
            new = range(max(0, self._page_count(own.written) - 1), needed)
            pages = np.array(sorted({*self._pages_of(own.changed), *new}), np.int64)
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                part = own.buffer.view[int(run[0]) * page_bytes : (int(run[-1]) + 1) * page_bytes]
                self._file.write(own.first_page + int(run[0]), [part])
        own.written = own.columns
        own.checksum = self._checksum(own, own.written)
        own.changed.clear()

    def _checksum(self, own: _LayerCentroids, columns: int) -> int:
        """Return the checksum of the pages in memory that hold the first `columns` columns."""
        assert own.buffer is not None
        length = self._page_count(columns) * self._file.page_bytes
        return xxhash.xxh3_64_intdigest(own.buffer.view[:length])

    def _pages_of(self, rows: Iterable[tuple[int, int]]) -> set[int]:
        """Return the pages, within the layer's place, that hold rows given by head and cluster."""
        row_bytes, page_bytes = self._width * 4, self._file.page_bytes
        found: set[int] = set()
        for head, cluster in rows:
            start = (cluster * self._heads + head) * row_bytes
            found.update(range(start // page_bytes, (start + row_bytes - 1) // page_bytes + 1))
        return found
