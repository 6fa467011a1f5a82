"""What one request holds of a store while it runs: entries that must not be evicted, and loads in progress."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class Lease:
    """A context manager of one request: keeps its entries from being evicted, and cancels its unused loads at the end.

    To be used in one thread. KV that was found through it stays valid afterwards. It may then be evicted, and layers that have
    not arrived from a server are read only when they are used.
    """

    def __init__(self, pins: "Pins") -> None:
        self._pins = pins
        self._pinned: list[str] = []
        self._cancellations: list[Callable[[], None]] = []

    def pin(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._pins.pin(keys)
        self._pinned += keys

    def on_close(self, cancel: Callable[[], None]) -> None:
        self._cancellations.append(cancel)

    def close(self) -> None:
        """Cancel the loads and unpin the entries; may be called twice."""
        cancellations, self._cancellations = self._cancellations, []
        pinned, self._pinned = self._pinned, []
        for cancel in cancellations:
            cancel()
        self._pins.unpin(pinned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pins:
    """Counts, for every entry, the requests of this process that use it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()

    def pin(self, keys: Iterable[str]) -> None:
        with self._guard:
            self._counts.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        with self._guard:
            self._counts.subtract(keys)
            self._counts = +self._counts

    def in_use(self) -> frozenset[str]:
        with self._guard:
            return frozenset(self._counts)
