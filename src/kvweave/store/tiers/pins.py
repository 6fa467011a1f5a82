"""Which entries running requests use, so that none of them is evicted meanwhile."""

import threading
from collections import Counter
from collections.abc import Iterable


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
