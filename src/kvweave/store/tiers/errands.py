"""The thread that keeps the shared tier in step while the process does other things.

It sleeps until it is woken, or until what failed, the tier or the catalogue, is to be tried again. Whatever it has not
done when the process ends is in the catalogue, for the next one.
"""

import logging
import sqlite3
import threading

from kvweave.errors import StoreError
from kvweave.store.tiers.shared import SharedTier

_LOG = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0


class ErrandThread:
    """Works off the errands of `shared` in a thread that starts when it is first woken."""

    def __init__(self, shared: SharedTier) -> None:
        self._shared = shared
        self._woken = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._told = False

    @property
    def pending(self) -> int:
        """How many errands wait."""
        return self._shared.rows.waiting(self._shared.namespace)

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()
        with self._guard:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._live, name="kvweave-shared", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Do what is left, unless the tier fails, and end the thread."""
        with self._guard:
            self._closing = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._work()

    def _live(self) -> None:
        while not self._closing:
            self._woken.wait(LOOK_AGAIN_S if self._has_failed else None)
            self._woken.clear()
            if not self._closing:
                self._work()

    @property
    def _has_failed(self) -> bool:
        """Whether something may be left that will be possible later, though nobody wakes this thread for it."""
        return self._told or self._shared.tier.failing or self._shared.tier.refusing

    def _work(self) -> None:
        try:
            while self._shared.work_off():
                pass
            self._told = False
        except (StoreError, sqlite3.Error, OSError) as error:
            if not self._told:
                _LOG.warning("the shared tier is not kept in step for now: %s", error)
            self._told = True
