"""A file of pages: positioned reads of whole runs straight into frames, and writes, past the page cache where it can.

Asynchronous by a few threads, each in one system call per run. Errors of the disk become StoreError and StoreFull;
what was read short is an error too, never zeros. Knows nothing of what pages hold.
"""

import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.counters import DecodeCounts
from kvweave.errors import StoreError, StoreFull

_MOST_PARTS = 512  # buffers of one system call; Linux takes 1024
_DIRECT_UNIT = 4096
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Pages one after the other from `first` on, and the memory they go to, together `pages` long."""

    first: int
    pages: int
    parts: tuple[memoryview, ...]


class PageFile:
    """Pages of `page_bytes` in a file of its own.

    With `path` None the file has no name: it is gone when it is closed, however the process ends. A named one is
    opened as it is, or made. `direct` asks for reads and writes past the page cache; where the file system or the
    page size do not allow it, ordinary ones are used and `direct` is False afterwards.
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
        self._counts = counts
        self.direct = direct and page_bytes % _DIRECT_UNIT == 0 and hasattr(os, "O_DIRECT")
        try:
            self._descriptor = self._open(path, folder)
        except OSError as error:
            raise StoreError(
                f"no file for the KV can be made in {folder or path}: {error.strerror or error}; name a folder that "
                "can be written to"
            ) from error
        self._release = weakref.finalize(self, os.close, self._descriptor)  # where nobody closes it
        self._threads = ThreadPoolExecutor(readers, thread_name_prefix="kvweave-flash")
        self._staging = AlignedBuffer(page_bytes)
        self.closed = False

    def read(self, runs: Sequence[Run]) -> "list[Future[None]]":
        """Start reading; each future raises StoreError for its runs. The memory must be left alone until then."""
        self._counts.reads += len(runs)
        pages = sum(run.pages for run in runs)
        self._counts.pages_read += pages
        self._counts.bytes_read += pages * self.page_bytes
        share = max(1, -(-len(runs) // max(1, self._threads._max_workers)))
        return [
            self._threads.submit(self._read_all, runs[start : start + share])
            for start in range(0, len(runs), share)
        ]

    def write(self, first: int, parts: Iterable[memoryview]) -> None:
        """Write whole pages from page `first` on; returns when the system has taken them.

        Raises StoreFull if there is no space left, StoreError for any other failure.
        """
        views = list(parts)
        at = first * self.page_bytes
        self._counts.writes += 1
        for start in range(0, len(views), _MOST_PARTS):
            some = views[start : start + _MOST_PARTS]
            length = sum(map(len, some))
            try:
                written = os.pwritev(self._descriptor, some, at)
            except OSError as error:
                raise _refused(error, "written") from error
            if written != length:
                raise StoreFull(
                    f"only {written} of {length} bytes of KV could be written: the disk is full; free some space or name "
                    "another folder"
                )
            at += length
            self._counts.pages_written += length // self.page_bytes
            self._counts.bytes_written += length

    def write_copied(self, first: int, page: Tensor) -> None:
        """Write one page (page bytes,) uint8 from memory that need not be aligned."""
        torch.frombuffer(self._staging.view, dtype=torch.uint8)[: self.page_bytes] = page
        self.write(first, [self._staging.view])

    def sync(self) -> None:
        """Bring what was written to the disk itself."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _refused(error, "written") from error

    @property
    def length_bytes(self) -> int:
        """How long the file is."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Wait for reads under way and close; closing twice is fine."""
        if not self.closed:
            self.closed = True
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._release()

    def _open(self, path: Path | None, folder: Path | None) -> int:
        if path is None and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        name = path or Path(tempfile.mktemp(prefix="kvweave-kv-", dir=folder))  # made with O_EXCL below
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if path is None else 0)
        try:
            descriptor = self._open_directly(name, flags)
        finally:
            if path is None:
                name.unlink(missing_ok=True)
        return descriptor

    def _open_directly(self, name: Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(name, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                _LOG.info("no direct reads in %s; KV goes through the page cache", name.parent)
                self.direct = False
                flags &= ~os.O_EXCL  # the refused call may have made the file
        return os.open(name, flags, 0o600)

    def _read_all(self, runs: Sequence[Run]) -> None:
        for run in runs:
            at = run.first * self.page_bytes
            for start in range(0, len(run.parts), _MOST_PARTS):
                self._read_into(run.parts[start : start + _MOST_PARTS], at)
                at += sum(map(len, run.parts[start : start + _MOST_PARTS]))

    def _read_into(self, parts: Sequence[memoryview], at: int) -> None:
        length = sum(map(len, parts))
        try:
            read = os.preadv(self._descriptor, parts, at)
        except OSError as error:
            raise _refused(error, "read") from error
        if read != length:
            raise StoreError(
                f"the file of KV ends at byte {at + read}, {length - read} bytes early: it was cut short; start again from "
                "the text"
            )


def finish(reads: "Sequence[Future[None]]") -> None:
    """Wait until all have ended; raises what one of them failed with."""
    failures = [failure for read in reads if (failure := read.exception()) is not None]
    if failures:  # raised itself, it would hold by its traceback whoever holds the reads, and they hold it
        raise copy(failures[0]) from failures[0]


class AlignedBuffer:
    """Memory at a page's boundary, as direct reads and writes need it."""

    def __init__(self, length: int) -> None:
        self.view = memoryview(mmap.mmap(-1, max(length, mmap.PAGESIZE)))[:length]


def _refused(error: OSError, done: str) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("no space is left on the disk for the KV; free some or name another folder")
    return StoreError(f"the KV could not be {done}: {error.strerror or error}; start again from the text")


class PageMemory(Protocol):
    """Frames that pages are read into, or written from."""

    def view(self, first: int, count: int) -> memoryview:
        """The memory of `count` frames from `first` on."""
        ...


def joined(
    numbers: NDArray[np.int64],
    frames: NDArray[np.int64],
    memory: PageMemory,
    waste: memoryview,
    gap_pages: int,
) -> list[Run]:
    """Runs that bring pages `numbers` (n,) of the file, no two the same, into `frames` (n,), or the other way.

    Gaps up to `gap_pages` between two pages are read through into `waste`, which is at least that long.
    """
    order = np.argsort(numbers)
    numbers, frames = numbers[order], frames[order]
    gaps = np.diff(numbers) - 1
    apart = np.flatnonzero((gaps > 0) | (np.diff(frames) != 1)) + 1  # where a part of memory begins
    starts = np.concatenate([[0], apart])[: len(numbers)]
    lengths = np.diff(starts, append=len(numbers))
    before = np.concatenate([[gap_pages + 1], gaps[apart - 1]])[: len(starts)]
    page_bytes = len(waste) // max(1, gap_pages)
    runs: list[Run] = []
    parts: list[memoryview] = []
    first = end = 0
    for number, frame, length, gap in zip(
        numbers[starts].tolist(), frames[starts].tolist(), lengths.tolist(), before.tolist(), strict=True
    ):
        if gap > gap_pages:
            if parts:
                runs.append(Run(first, end - first, tuple(parts)))
            first, parts = number, []
        elif gap:
            parts.append(waste[: gap * page_bytes])
        parts.append(memory.view(frame, length))
        end = number + length
    if parts:
        runs.append(Run(first, end - first, tuple(parts)))
    return runs
