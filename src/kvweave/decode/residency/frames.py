"""Memory in page-sized frames, all of one mapping, so that reads from flash land where they stay.

The mapping is touched, and so takes memory, only as frames are used. Knows nothing of what lies in a frame.
"""

import mmap
from collections.abc import Sequence

import torch
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
