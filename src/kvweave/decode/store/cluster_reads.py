"""Reads of clusters from disk into frames, several at once; each cluster's checksum is verified when its read is done.

Clusters that are being read stay in the page cache, so that their frames are not reused.
"""

import weakref
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.decode.cluster_table import ClusterKey, ClusterKeys, key_array, key_list, table_column
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_pages import ClusterPages
from kvweave.decode.store.frames import gather_pages
from kvweave.decode.store.page_cache import PageCache
from kvweave.decode.store.tail_pages import TailPages
from kvweave.errors import StoreError

_BLOCK_PAGES = 64  # copied at once to be checked


@dataclass(frozen=True, slots=True, eq=False)
class _ReadBatch:
    """Clusters (n, 3) that are read together."""

    keys: NDArray[np.int64]
    reads: "tuple[Future[None], ...]"


class ClusterReads:
    """Reads from `pages` into `page_cache`; the last page of a cluster may be in `tails` instead."""

    def __init__(
        self, pages: ClusterPages, page_cache: PageCache, tails: TailPages, counts: DecodeCounts
    ) -> None:
        self._pages = pages
        self._page_cache = page_cache
        self._tails = tails
        self._counts = counts
        self._in_flight: dict[ClusterKey, _ReadBatch] = {}
        reads = weakref.proxy(self)  # a cycle would keep all frames alive
        page_cache.wait_for_reads = lambda: reads.wait_for_all()

    def start(self, missing: ClusterKeys, *, prefetched: bool) -> None:
        """Allocate frames for these clusters and start reading them."""
        missing = key_array(missing)
        if not len(missing):
            return
        page_cache, frames = self._page_cache, self._page_cache.frames
        sizes = table_column("sizes", self._pages.tables, missing)
        counts = self.disk_pages(missing, sizes)
        while frames.free_count < counts.sum():
            page_cache.ensure_free(int(counts.sum()))
            counts = self.disk_pages(missing, sizes)  # more if a tail had to leave
        allocated = frames.allocate(int(counts.sum()))
        batch = _ReadBatch(missing, self._read(missing, counts, allocated))
        page_entries = self._pages.entry_format.page_entries
        self._counts.entries_read += int(np.minimum(sizes, counts * page_entries).sum())
        at = 0
        for key, count in zip(key_list(missing), counts.tolist(), strict=True):
            own = allocated[at : at + count]
            at += count
            if unwritten := key in self._tails:
                own.append(self._tails.pop(key))
            page_cache.insert(key, own, prefetched=prefetched, unwritten=unwritten)
            self._in_flight[key] = batch
        page_cache.mark_reading(missing)

    def wait(self, keys: ClusterKeys) -> None:
        """Wait for reads of these clusters, and verify them. Raises StoreError."""
        if self._in_flight:
            reading = key_list(self._page_cache.being_read(keys))
            for batch in dict.fromkeys(self._in_flight[key] for key in reading):
                self._finish(batch)

    def wait_for_layer(self, layer: int) -> None:
        """As `wait`, for all clusters of a layer."""
        self.wait([key for key in self._in_flight if key[0] == layer])

    def wait_for_all(self) -> None:
        self.wait(list(self._in_flight))

    def cancel(self) -> None:
        for batch in set(self._in_flight.values()):
            for read in batch.reads:
                read.cancel()

    def disk_pages(self, keys: ClusterKeys, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many pages must be read of clusters of these sizes that are not in memory, (n,)."""
        return self._pages.entry_format.page_count(sizes) - self._tails.contains(keys)

    def _read(
        self, keys: NDArray[np.int64], counts: NDArray[np.int64], frames: list[int]
    ) -> "tuple[Future[None], ...]":
        """Start reading the first `counts` (n,) pages of clusters into frames."""
        numbers = self._pages.page_numbers(keys, counts)
        runs = self._pages.runs(numbers, np.array(frames, np.int64), self._page_cache.frames)
        self._counts.cluster_reads += len(runs)
        return tuple(self._pages.file.read(runs))

    def _finish(self, batch: _ReadBatch) -> None:
        failure: BaseException | None = None
        for read in batch.reads:
            failure = read.exception() or failure  # all must have ended before frames are reused
        keys = key_list(batch.keys)
        for key in keys:
            self._in_flight.pop(key, None)
        self._page_cache.unmark_reading(batch.keys)
        damaged = None if failure else self._damaged(keys)
        if failure is None and damaged is None:
            return
        for key in keys:
            self._page_cache.frames.free(self._page_cache.remove(key))
        if failure is not None:
            raise copy(failure) from failure  # see `page_file.wait_for`
        raise StoreError(f"cluster {damaged} was read and is not what was written; start again from the text")

    def _damaged(self, keys: list[ClusterKey]) -> ClusterKey | None:
        """Return the first cluster whose pages do not match its checksum, if any."""
        frames, counts = self._page_cache.all_frames(keys)
        pages = self._page_cache.frames.pages
        sums = [  # unused bytes of a page are zero
            gather_pages(pages, some).view(torch.int64).numpy().sum(1)
            for some in torch.from_numpy(frames).split(_BLOCK_PAGES)
        ]
        running = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))  # modulo 2⁶⁴, as differences are
        ends = np.cumsum(counts)
        found = running[ends] - running[ends - counts]
        wrong = np.flatnonzero(found != table_column("checksums", self._pages.tables, keys))
        return keys[wrong[0]] if wrong.size else None
