"""Pages that lie beside each other are read at once: sorted and joined into runs.

Array work over all pages of a layer; the memory that a gap is read into is thrown away. Knows nothing of clusters.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.flash.page_file import Run


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
