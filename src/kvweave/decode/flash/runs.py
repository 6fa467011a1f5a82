"""Pages that lie beside each other are read at once: extents sorted and joined into runs.

Array work over all extents of a layer; the memory that a gap is read into is thrown away. Knows nothing of clusters.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.flash.page_file import Run
from kvweave.decode.flash.pools import Extent


class PageMemory(Protocol):
    """Frames that pages are read into."""

    def views(self, frames: Sequence[int]) -> list[memoryview]:
        """The frames' memory, neighbours joined."""
        ...


def joined(
    extents: Sequence[Extent],
    frames: Sequence[Sequence[int]],
    memory: PageMemory,
    waste: memoryview,
    gap_pages: int,
) -> list[Run]:
    """Runs that read all `extents` into their `frames`, both given in the cluster's own order.

    Gaps up to `gap_pages` between two extents are read through into `waste`, which is at least that long.
    """
    if not extents:
        return []
    first = np.fromiter((e.first for e in extents), np.int64, len(extents))
    count = np.fromiter((e.pages for e in extents), np.int64, len(extents))
    order = np.argsort(first, kind="stable")
    gaps = _gaps(first[order], count[order])
    page_bytes = len(waste) // max(1, gap_pages) if gap_pages else 0
    runs: list[Run] = []
    for group in np.split(order, np.flatnonzero(gaps > gap_pages) + 1):
        parts: list[memoryview] = []
        at = int(first[group[0]])
        for index in group:
            extent, own = extents[index], frames[index]
            if extent.first > at:
                parts.append(waste[: (extent.first - at) * page_bytes])
            parts += memory.views(own[::-1] if extent.backward else own)
            at = extent.first + extent.pages
        start = int(first[group[0]])
        runs.append(Run(start, at - start, tuple(parts)))
    return runs


def _gaps(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pages between each sorted extent and the next."""
    return first[1:] - (first[:-1] + count[:-1])
