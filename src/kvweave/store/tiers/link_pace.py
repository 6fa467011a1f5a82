"""How fast bytes come from a place: what the layers that are still to come are expected by."""

import threading
import time
from collections.abc import Callable, Sequence

from kvweave.store.tiers.tier import Blob

KEPT = 0.9
"""Each read counts so much less once another one has come: what is told is the pace of the last ten or so."""


class LinkPace:
    """The pace of all reads from one place taken together, as several of them share a link. Safe to use from several threads.

    `clock` gives seconds from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._under_way = 0
        self._asked_bytes = 0  # at most, by all that is under way
        self._since_s = 0.0  # since then something is under way, and nothing has come
        self._seconds = self._bytes = 0.0

    def timed(self, read: Callable[[], Sequence[Blob] | None], most_bytes: int) -> Sequence[Blob] | None:
        """What `read` returns, at most so many bytes; how many, and how long they took, counts from now on."""
        with self._guard:
            if not self._under_way:
                self._since_s = self._clock()
            self._under_way += 1
            self._asked_bytes += most_bytes
        size = 0
        try:
            came = read()
            size = sum(map(len, came or ()))
        finally:
            with self._guard:
                self._under_way -= 1
                self._asked_bytes -= most_bytes
                if size:
                    self._came(size)
        return came

    def takes_s(self, size_bytes: float) -> float:
        """How long so many bytes take to come: no less than what should have come by now is late."""
        with self._guard:
            pace = self._seconds / self._bytes if self._bytes else 0.0  # s for each byte
            waited_s = self._clock() - self._since_s if self._under_way else 0.0
            return max(size_bytes * pace, waited_s - self._asked_bytes * pace)

    def _came(self, size_bytes: int) -> None:
        now_s = self._clock()
        self._seconds = KEPT * self._seconds + now_s - self._since_s
        self._bytes = KEPT * self._bytes + size_bytes
        self._since_s = now_s
