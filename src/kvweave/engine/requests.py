"""Users' requests under way on a knowledge base, in this process or another, so that idle work can give way.

A request holds a shared lock on a file; whoever wants to know tries to lock it alone. The operating system releases the
lock of a killed process. The file's time says when a request last came or went.
"""

import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_LOG = logging.getLogger(__name__)


class Arrival:
    """One request under way, from the moment it is made until `leave`; a context manager."""

    def __init__(self, path: Path) -> None:
        self._leave: Callable[[], object] = lambda: None
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._leave = weakref.finalize(self, _release, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
        except (
            OSError
        ) as error:  # a full disk, no permission, a file system without locks: it can still be answered
            _LOG.debug("idle work may not notice this request: %s", error)

    def leave(self) -> None:
        """The request is over; a second time does nothing."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Requests:
    """The requests that lock the file at `path`, which is made by the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def arrive(self) -> Arrival:
        """A user's request has come."""
        return Arrival(self._path)

    @property
    def under_way(self) -> bool:
        """Whether there is one; takes microseconds."""
        if self._descriptor is None and not self._open():
            return False
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    @property
    def quiet_s(self) -> float:
        """Seconds since a request last came or went; infinite if there was none."""
        try:
            return max(0.0, time.time() - self._path.stat().st_mtime)
        except FileNotFoundError:
            return float("inf")

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        weakref.finalize(self, os.close, self._descriptor)
        return True


def _release(descriptor: int) -> None:
    with suppress(OSError):
        os.utime(descriptor)
    os.close(descriptor)
