"""A file of pages: reads of whole runs directly into frames, and writes, bypassing the system's page cache if possible.

A few threads read concurrently, one system call per run. Disk errors become StoreError and StoreFull. A short read is an
error too, and never yields zeros. Knows nothing of what pages hold.
"""

import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.counters import DecodeCounts
from kvweave.errors import StoreError, StoreFull

_MAX_BUFFERS = 512  # of one system call; Linux accepts 1024
_DIRECT_UNIT = 4096
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages from `first` on, and the buffers they go to, together `pages` long."""

    first: int
    pages: int
    buffers: tuple[memoryview, ...]


class PageFile:
    """Pages of `page_bytes` in a file of their own.

    With `path` None the file has no name in `folder` and disappears when it is closed, however the process ends. A named
    file is opened, or created if it does not exist. `direct` asks for direct reads and writes. If the file system or the
    page size does not allow them, ordinary ones are used and the attribute `direct` is False.

    Raises StoreError if the file cannot be created.
    """

    def __init__(
        self,
        path: Path | None,
        page_bytes: int,
        counts: DecodeCounts,
        *,
        folder: Path | None = None,
        direct: bool = True,
        readers: int = 4,
    ) -> None:
        self.page_bytes = page_bytes
        self.direct = direct and page_bytes % _DIRECT_UNIT == 0 and hasattr(os, "O_DIRECT")
        self.closed = False
        self._counts = counts
        try:
            self.descriptor = self._open(path, folder)
        except OSError as error:
            raise StoreError(
                f"no file for the KV can be made in {folder or path}: {error.strerror or error}; name a folder that "
                "can be written to"
            ) from error
        self._close = weakref.finalize(self, os.close, self.descriptor)  # also if `close` is never called
        self._threads = ThreadPoolExecutor(readers, thread_name_prefix="kvweave-disk")

    def read(self, runs: Sequence[Run]) -> "list[Future[None]]":
        """Start reading; each future raises StoreError for its runs. Leave the buffers alone until then."""
        self._counts.reads += len(runs)
        pages = sum(run.pages for run in runs)
        self._counts.pages_read += pages
        self._counts.bytes_read += pages * self.page_bytes
        share = max(1, -(-len(runs) // max(1, self._threads._max_workers)))
        return [
            self._threads.submit(self._read_runs, runs[start : start + share])
            for start in range(0, len(runs), share)
        ]

    def write(self, first: int, buffers: Iterable[memoryview]) -> None:
        """Write whole pages from page `first` on; returns when the system has accepted them.

        Raises StoreFull if there is no space left, StoreError for any other failure.
        """
        self._counts.writes += 1
        for some, at, length in self._batches(first, list(buffers)):
            try:
                written = os.pwritev(self.descriptor, some, at)
            except OSError as error:
                raise _store_error(error, "written") from error
            if written != length:
                raise StoreFull(
                    f"only {written} of {length} bytes of KV could be written: the disk is full; free some space or name "
                    "another folder"
                )
            self._counts.pages_written += length // self.page_bytes
            self._counts.bytes_written += length

    def sync(self) -> None:
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise _store_error(error, "written") from error

    def close(self) -> None:
        """Wait for reads in flight and close; closing twice is fine."""
        if not self.closed:
            self.closed = True
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._close()

    def _open(self, path: Path | None, folder: Path | None) -> int:
        if path is None and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        name = path or Path(tempfile.mktemp(prefix="kvweave-kv-", dir=folder))  # created with O_EXCL below
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if path is None else 0)
        try:
            descriptor = self._open_direct(name, flags)
        finally:
            if path is None:
                name.unlink(missing_ok=True)
        return descriptor

    def _open_direct(self, name: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(name, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                _LOG.info("no direct reads in %s; KV goes through the page cache", name.parent)
                self.direct = False
                flags &= ~os.O_EXCL  # the failed call may have created the file
        return os.open(name, flags, 0o600)

    def _read_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            for some, at, length in self._batches(run.first, run.buffers):
                try:
                    read = os.preadv(self.descriptor, some, at)
                except OSError as error:
                    raise _store_error(error, "read") from error
                if read != length:
                    raise StoreError(
                        f"the file of KV ends at byte {at + read}, {length - read} bytes early: it was cut short; start again "
                        "from the text"
                    )

    def _batches(
        self, first: int, buffers: Sequence[memoryview]
    ) -> Iterator[tuple[Sequence[memoryview], int, int]]:
        """Divide what starts at page `first` by system calls: the buffers, place and length in bytes of each."""
        at = first * self.page_bytes
        for start in range(0, len(buffers), _MAX_BUFFERS):
            some = buffers[start : start + _MAX_BUFFERS]
            length = sum(map(len, some))
            yield some, at, length
            at += length


def wait_for(reads: "Sequence[Future[None]]") -> None:
    """Wait for all reads; raise the first failure."""
    failures = [failure for read in reads if (failure := read.exception()) is not None]
    if failures:  # a copy: the original's traceback would keep the reads alive (reference cycle)
        raise copy(failures[0]) from failures[0]


class AlignedBuffer:
    """Page-aligned memory, for direct reads and writes."""

    def __init__(self, length: int) -> None:
        self.view = memoryview(mmap.mmap(-1, max(length, mmap.PAGESIZE)))[:length]


class PageMemory(Protocol):
    """Frames that pages are read into or written from."""

    def view(self, first: int, count: int) -> memoryview:
        """Return the memory of `count` frames from `first` on."""


def merge_runs(
    numbers: NDArray[np.int64],
    frames: NDArray[np.int64],
    memory: PageMemory,
    gap_buffer: memoryview,
    gap_pages: int,
) -> list[Run]:
    """Return the runs that transfer pages `numbers` (n,), all different, to or from `frames` (n,).

    Gaps of up to `gap_pages` between two pages are read into `gap_buffer`, which is at least that long.
    """
    order = np.argsort(numbers)
    numbers, frames = numbers[order], frames[order]
    gaps = np.diff(numbers) - 1
    breaks = np.flatnonzero((gaps > 0) | (np.diff(frames) != 1)) + 1  # where a new buffer begins
    starts = np.concatenate([[0], breaks])[: len(numbers)]
    lengths = np.diff(starts, append=len(numbers))
    gaps_before = np.concatenate([[gap_pages + 1], gaps[breaks - 1]])[: len(starts)]
    page_bytes = len(gap_buffer) // max(1, gap_pages)
    runs: list[Run] = []
    buffers: list[memoryview] = []
    first = end = 0
    for number, frame, length, gap in zip(
        numbers[starts].tolist(), frames[starts].tolist(), lengths.tolist(), gaps_before.tolist(), strict=True
    ):
        if gap > gap_pages:
            if buffers:
                runs.append(Run(first, end - first, tuple(buffers)))
            first, buffers = number, []
        elif gap:
            buffers.append(gap_buffer[: gap * page_bytes])
        buffers.append(memory.view(frame, length))
        end = number + length
    if buffers:
        runs.append(Run(first, end - first, tuple(buffers)))
    return runs


def _store_error(error: OSError, action: str) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("no space is left on the disk for the KV; free some or name another folder")
    return StoreError(f"the KV could not be {action}: {error.strerror or error}; start again from the text")
