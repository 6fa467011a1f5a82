"""Memory in page-sized frames, all of one mapping, so that reads from flash land where they stay.

The mapping is touched, and so takes memory, only as frames are used. Knows nothing of what lies in a frame.
"""

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class FrameNumbers:
    """Which of `count` frames of `page_bytes`, wherever they are, are in use."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count = count
        self.page_bytes = page_bytes
        self._returned: list[int] = []
        self._untouched = 0  # frames from here on were never used
        self._end = count

    @property
    def free(self) -> int:
        """How many are not in use."""
        return len(self._returned) + self._end - self._untouched

    def take(self, number: int) -> list[int]:
        """So many free frames; there must be as many."""
        assert number <= self.free
        again = min(number, len(self._returned))
        taken = self._returned[len(self._returned) - again :]
        del self._returned[len(self._returned) - again :]
        first = self._untouched
        self._untouched += number - again
        return [*taken[::-1], *range(first, self._untouched)]

    def give(self, frames: Sequence[int]) -> None:
        """Take frames back; their content is lost. They are taken again in the order in which they are given."""
        self._returned.extend(reversed(frames))


class Frames(FrameNumbers):
    """Frames in memory; frame f's bytes are `pages[f]`, a (count, page_bytes) uint8 tensor."""

    def __init__(self, count: int, page_bytes: int) -> None:
        super().__init__(count, page_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(count, 1) * page_bytes, flags=flags)
        self._view = memoryview(self._memory)
        self.pages: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(-1, page_bytes)
        self._whole = count
        self._withdrawn: list[int] = []  # of those used before

    @property
    def touched_bytes(self) -> int:
        """Memory taken so far."""
        return (self._untouched - len(self._withdrawn)) * self.page_bytes

    @property
    def withdrawn(self) -> int:
        """How many frames may be given back."""
        return self._whole - self.count

    def withdraw(self, number: int) -> None:
        """Do without so many free frames and hand their memory back to the system."""
        assert number <= self.free
        never_used = min(number, self._end - self._untouched)
        self._end -= never_used
        for frame in self.take(number - never_used):
            start = frame * self.page_bytes
            if self.page_bytes % mmap.PAGESIZE == 0:
                self._memory.madvise(mmap.MADV_DONTNEED, start, self.page_bytes)
            self._withdrawn.append(frame)
        self.count -= number

    def give_back(self, number: int) -> None:
        """Have so many of the frames again that were withdrawn."""
        assert number <= self.withdrawn
        again = self._withdrawn[len(self._withdrawn) - min(number, len(self._withdrawn)) :]
        del self._withdrawn[len(self._withdrawn) - len(again) :]
        self.give(again)
        self._end += number - len(again)
        self.count += number

    def view(self, first: int, count: int) -> memoryview:
        """The memory of `count` frames from `first` on."""
        return self._view[first * self.page_bytes : (first + count) * self.page_bytes]


def rows_of(pages: Tensor, index: Tensor) -> Tensor:
    """Copies of pages `index` (…) of (count, page bytes), (…, page bytes); indexing bytes by a tensor takes ten times as long."""
    return pages.index_select(0, index.to(pages.device).flatten()).view(*index.shape, pages.shape[1])


Order = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""One number per cluster: the largest leave first."""

UPDATED_ROWS = 16
"""For how many rows a cluster counts as recently updated; the paper follows them as far (Table 2)."""
UPDATED_SHARE = 0.25
"""At most this share of the frames is kept for recently updated clusters."""


@dataclass(frozen=True, slots=True)
class Known:
    """About clusters in memory, (n,) each: the row at which each was last used and last updated, how often it was
    used, how many pages it takes, how often its layer attended without it since, and how much of a row it is until
    its layer attends again, in [0, 1). `now` is the current row, `frames` how many there are in all.
    """

    used_at: NDArray[np.int64]
    updated_at: NDArray[np.int64]
    uses: NDArray[np.int64]
    pages: NDArray[np.int64]
    missed: NDArray[np.int64]
    until: NDArray[np.float64]
    now: int
    frames: int


def least_recently_used(known: Known) -> Order:
    """LRU."""
    return (known.now - known.used_at).astype(np.float64)


def least_frequently_used(known: Known) -> Order:
    """LFU; among those used equally often, LRU."""
    age = (known.now - known.used_at).astype(np.float64)
    order: Order = age / (age.max(initial=0) + 1) - known.uses
    return order


def large_and_settled(known: Known) -> Order:
    """Large clusters not used of late leave first; recently updated ones stay while they take a quarter at most.

    Size weighs as age does: what is twice as large must have been used twice as recently to stay. Layers attend in
    turn, so age is how often a cluster's own layer did without it; of two alike the one leaves whose layer comes later.
    """
    last = (1 + known.missed + known.until / 2) * known.pages
    since = known.now - known.updated_at
    latest = np.argsort(since, kind="stable")
    within = np.cumsum(known.pages[latest]) <= UPDATED_SHARE * known.frames
    kept = latest[within & (since[latest] <= UPDATED_ROWS)]
    last[kept] = -1.0 / (1.0 + since[kept])
    return last


REPLACEMENTS: Mapping[str, Callable[[Known], Order]] = {
    "cluster": large_and_settled,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
}
