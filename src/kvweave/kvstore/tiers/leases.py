"""What one request holds of a store while it runs: entries that must not be evicted, and loads that may still be under way."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self


class Pins:
    """Counts, for every entry, the requests of this process that use it; safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()

    def pin(self, keys: Iterable[str]) -> None:
        """One more request uses these."""
        with self._guard:
            self._counts.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        """One request is done with these."""
        with self._guard:
            self._counts.subtract(keys)
            self._counts = +self._counts

    def in_use(self) -> frozenset[str]:
        """What is pinned at this moment."""
        with self._guard:
            return frozenset(self._counts)


class Lease:
    """A context manager; leaving it, whichever way, cancels what was loaded ahead and never used, and lets go of the rest.

    Owned by one request and used in one thread. KV that was found through it stays valid afterwards; it may then be
    evicted, and what of it has not come from a server yet comes only when it is asked for.
    """

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._pinned: list[str] = []
        self._cancellations: list[Callable[[], None]] = []

    def pin(self, keys: Iterable[str]) -> None:
        """The request uses these entries."""
        keys = list(keys)
        self._pins.pin(keys)
        self._pinned += keys

    def on_close(self, cancel: Callable[[], None]) -> None:
        """The request has asked for something ahead of time, which is then to be cancelled."""
        self._cancellations.append(cancel)

    def close(self) -> None:
        """Let go of everything; may be called twice."""
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
