"""Page-sized frames of memory, all in one mapping, so that reads from disk need no copy.

Frames take memory only once they are used. Knows nothing of what a frame holds.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class FramePool:
    """Allocates `count` frames of `page_bytes`; the bytes of frame f are `pages[f]`, with `pages` a (count, page_bytes) uint8 tensor."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self.count = count
        self.page_bytes = page_bytes
        self._returned: list[int] = []
        self._untouched = 0  # frames from here to the end were never used
        self._end = count
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(count, 1) * page_bytes, flags=flags)
        self._view = memoryview(self._memory)
        self.pages: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8).view(-1, page_bytes)
        self._full_count = count
        self._withdrawn: list[int] = []  # of the frames that were used before

    @property
    def free_count(self) -> int:
        return len(self._returned) + self._end - self._untouched

    def allocate(self, number: int) -> list[int]:
        """Allocate free frames; there must be enough."""
        assert number <= self.free_count
        reused = min(number, len(self._returned))
        frames = self._returned[len(self._returned) - reused :]
        del self._returned[len(self._returned) - reused :]
        first = self._untouched
        self._untouched += number - reused
        return [*frames[::-1], *range(first, self._untouched)]

    def free(self, frames: Sequence[int]) -> None:
        """Free frames; their content is lost. They are reused in this order."""
        self._returned.extend(reversed(frames))

    @property
    def touched_bytes(self) -> int:
        return (self._untouched - len(self._withdrawn)) * self.page_bytes

    @property
    def withdrawn(self) -> int:
        return self._full_count - self.count

    def withdraw(self, number: int) -> None:
        """Remove free frames from the pool, and return their memory to the system."""
        assert number <= self.free_count
        never_used = min(number, self._end - self._untouched)
        self._end -= never_used
        for frame in self.allocate(number - never_used):
            start = frame * self.page_bytes
            if self.page_bytes % mmap.PAGESIZE == 0:
                self._memory.madvise(mmap.MADV_DONTNEED, start, self.page_bytes)
            self._withdrawn.append(frame)
        self.count -= number

    def restore(self, number: int) -> None:
        """Add withdrawn frames to the pool again."""
        assert number <= self.withdrawn
        used_before = min(number, len(self._withdrawn))
        frames = self._withdrawn[len(self._withdrawn) - used_before :]
        del self._withdrawn[len(self._withdrawn) - used_before :]
        self.free(frames)
        self._end += number - used_before
        self.count += number

    def view(self, first: int, count: int) -> memoryview:
        """Return the memory of `count` frames from `first` on."""
        return self._view[first * self.page_bytes : (first + count) * self.page_bytes]


def gather_pages(pages: Tensor, index: Tensor) -> Tensor:
    """Return copies (…, page bytes) of the pages `index` (…) of (count, page bytes).

    Indexing bytes by a tensor takes ten times as long.
    """
    return pages.index_select(0, index.to(pages.device).flatten()).view(*index.shape, pages.shape[1])
