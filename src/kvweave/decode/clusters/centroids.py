"""The clusters' centroids: on flash, with one layer's at a time in memory (DynaKV §6.1) or all that were read.

A layer's are read when its attention begins and let go when it is done. Changed rows are kept until there are some
and then written in their pages. On flash and in memory they are (C, G, D) float32, so that a layer's are one run
however many clusters there are. What is read is checked against the layer's checksum, of all its pages. Knows nothing of
scores or entries.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from kvweave.decode.disk.page_file import AlignedBuffer, PageFile, Run, finish
from kvweave.errors import StoreError

SPARE_COLUMNS = 32  # room for clusters made while a layer's centroids are in memory
_KEPT_COLUMNS = 8  # changed rows held back, in units of one row per head


@dataclass(slots=True)
class _Layer:
    """One layer's: its `columns`, its place on flash, the columns written there and their checksum, changed rows, memory.

    The checksum is XXH3-64 of the pages that hold `written` columns.
    """

    columns: int = 0
    written: int = 0
    checksum: int = 0
    first_page: int = 0
    pages: int = 0
    changed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    memory: Tensor | None = None  # (room, G, D)
    buffer: AlignedBuffer | None = None
    reads: "list[Future[None]]" = field(default_factory=list)
    ready: bool = False  # what was read has come, and changed rows are in their places


class Centroids:
    """Centroids of all layers for G heads of width D, in a file of their own. `paged` False: none leave memory."""

    def __init__(self, layers: int, heads: int, width: int, file: PageFile, *, paged: bool) -> None:
        self._heads, self._width = heads, width
        self._file = file
        self._paged = paged
        self._layers = [_Layer() for _ in range(layers)]
        self._end_page = 0

    @property
    def resident_bytes(self) -> int:
        """What is in memory, and what must be free for changed rows and for the largest layer when its turn comes."""
        kept = (_KEPT_COLUMNS + 1) * self._heads
        rows = sum(max(len(own.changed), kept) for own in self._layers)
        held = sum(own.memory.nbytes for own in self._layers if own.memory is not None)
        largest = max((self._room(own.columns)[1] for own in self._layers), default=0)
        return rows * self._width * 4 + max(held, largest)

    def growth_bytes(self, layer: int, clusters: int, rows: int) -> int:
        """What memory takes more when a layer has come to have so many `clusters` more and so many `rows` have changed."""
        own = self._layers[layer]
        spare = max(0, (_KEPT_COLUMNS + 1) * self._heads - len(own.changed))
        changed = max(0, rows - spare) * self._width * 4
        columns = own.columns + clusters
        later = self._room(columns)[1] - max(self._room(other.columns)[1] for other in self._layers)
        have = self._room(own.columns)[0] if own.memory is None else own.memory.shape[0]
        now = 0 if columns <= have else self._room(columns)[1]  # the old memory goes afterwards
        return changed + max(now, later, 0)

    def begin(self, layer: int) -> None:
        """Start reading a layer's centroids without waiting; nothing if they are there or on their way."""
        own = self._layers[layer]
        if own.memory is not None:
            return
        room, length = self._room(own.columns)
        own.buffer = AlignedBuffer(length)
        whole = torch.frombuffer(own.buffer.view, dtype=torch.float32)
        own.memory = whole[: room * self._heads * self._width].view(room, self._heads, self._width)
        pages = self._pages(own.written)
        if pages:
            part = own.buffer.view[: pages * self._file.page_bytes]
            own.reads = self._file.read([Run(own.first_page, pages, (part,))])

    def of(self, layer: int) -> Tensor:
        """A layer's centroids (G, C, D), to be read only; waits for them. They stay until `end`.

        Raises StoreError where they cannot be read or are not what was written.
        """
        own = self._layers[layer]
        self.begin(layer)
        assert own.memory is not None
        if not own.ready:
            finish(own.reads)
            if own.reads and self._checksum(own, own.written) != own.checksum:
                raise StoreError(
                    f"the centroids of layer {layer} were read and are not what was written; start again from the text"
                )
            for (head, cluster), row in own.changed.items():
                own.memory[cluster, head] = row
            own.reads, own.ready = [], True
        return own.memory[: own.columns].transpose(0, 1)

    def put(self, layer: int, head: int, cluster: int, row: Tensor) -> None:
        """Give a cluster, a new one too, the centroid (D,)."""
        self.of(layer)
        own = self._layers[layer]
        if cluster >= own.columns:
            own.columns = cluster + 1
            self._widen(own)
        assert own.memory is not None
        own.memory[cluster, head] = row
        own.changed[head, cluster] = row.clone()

    def end(self, layer: int, *, write: bool = False) -> None:
        """A layer's centroids may leave memory; `write` what has changed, however little it is."""
        own = self._layers[layer]
        if write and own.changed:
            self.begin(layer)
        if own.memory is None:
            return
        self.of(layer)  # what is being read must have come before its memory goes
        if own.changed and (write or len(own.changed) > _KEPT_COLUMNS * self._heads):
            self._write(own)
        if self._paged:
            own.memory = own.buffer = None
            own.ready = False

    def state(self) -> list[list[int]]:
        """Where each layer's lie on flash, for `restore`; all must have been written."""
        return [[own.columns, own.first_page, own.pages, own.checksum] for own in self._layers]

    def restore(self, state: list[list[int]]) -> None:
        """Go on from what `state` gave, with the same file."""
        for own, (columns, first_page, pages, checksum) in zip(self._layers, state, strict=True):
            own.columns = own.written = columns
            own.checksum = checksum
            own.first_page, own.pages = first_page, pages
            self._end_page = max(self._end_page, first_page + pages)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def sync(self) -> None:
        """Have everything that was written on the disk."""
        self._file.sync()

    def _room(self, columns: int) -> tuple[int, int]:
        """Columns that memory for so many, and some to come, has; and its bytes."""
        room = columns + SPARE_COLUMNS
        length = room * self._heads * self._width * 4
        unit = self._file.page_bytes
        return room, -(-length // unit) * unit

    def _pages(self, columns: int) -> int:
        return -(-columns * self._heads * self._width * 4 // self._file.page_bytes)

    def _widen(self, own: _Layer) -> None:
        """More room in memory, if the new column needs it."""
        assert own.memory is not None
        if own.columns <= own.memory.shape[0]:
            return
        room, length = self._room(own.columns + own.columns // 2)
        buffer = AlignedBuffer(length)
        memory = torch.frombuffer(buffer.view, dtype=torch.float32)[: room * self._heads * self._width]
        memory = memory.view(room, self._heads, self._width)
        memory[: own.memory.shape[0]] = own.memory
        own.memory, own.buffer = memory, buffer

    def _write(self, own: _Layer) -> None:
        """Bring changed rows to flash: their pages, or all of them where the layer has outgrown its place."""
        assert own.buffer is not None
        needed = self._pages(own.columns)
        page_bytes = self._file.page_bytes
        if needed > own.pages:
            own.first_page, own.pages = self._end_page, 2 * needed
            self._end_page += own.pages
            self._file.write(own.first_page, [own.buffer.view[: needed * page_bytes]])
        else:
            # All that new columns take, rows of heads that have none there too: what was never written is no zeros.
            new = range(max(0, self._pages(own.written) - 1), needed)
            for first, end in _runs(sorted({*self._pages_of(own.changed, page_bytes), *new})):
                self._file.write(
                    own.first_page + first, [own.buffer.view[first * page_bytes : end * page_bytes]]
                )
        own.written = own.columns
        own.checksum = self._checksum(own, own.written)
        own.changed.clear()

    def _checksum(self, own: _Layer, columns: int) -> int:
        """Of the pages in memory that hold so many columns."""
        assert own.buffer is not None
        return xxhash.xxh3_64_intdigest(own.buffer.view[: self._pages(columns) * self._file.page_bytes])

    def _pages_of(self, rows: Iterable[tuple[int, int]], page_bytes: int) -> set[int]:
        """The pages, within the layer's place, that hold these rows."""
        length = self._width * 4
        found: set[int] = set()
        for head, cluster in rows:
            start = (cluster * self._heads + head) * length
            found.update(range(start // page_bytes, (start + length - 1) // page_bytes + 1))
        return found


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs, first and end."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs
