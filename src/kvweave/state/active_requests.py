"""Users' requests that are running on a knowledge base, in this process or another, so that background work can yield.

A running request holds a shared lock on a file. Background work tries to lock the file exclusively to see whether there
is one. The operating system releases the lock of a killed process. The file's time says when a request last started or
ended.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LOG = logging.getLogger(__name__)
POLL_S: Final = 0.02


class ProcessActivity:
    """The running requests of this process, whatever they run on; safe to use from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._running = 0
        self._changed_s = float("-inf")  # time.monotonic

    @property
    def any_active(self) -> bool:
        """Whether a request is running."""
        return self._running > 0

    @property
    def idle_s(self) -> float:
        """Seconds since a request last started or ended; infinite if there was none."""
        return time.monotonic() - self._changed_s

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while this lasts."""
        self.change(1)
        try:
            yield
        finally:
            self.change(-1)

    def change(self, by: int) -> None:
        """Count requests that start or, below 0, end."""
        with self._guard:
            self._running += by
            self._changed_s = time.monotonic()


class ActiveRequest:
    """One running request, from its construction until `close`; a context manager."""

    def __init__(self, path: Path, activity: ProcessActivity | None = None) -> None:
        self._close: Callable[[], object] = lambda: None
        self._leave: Callable[[], object] = lambda: None
        if activity is not None:
            activity.change(1)
            self._leave = weakref.finalize(self, activity.change, -1)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._close = weakref.finalize(self, _release, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.utime(descriptor)
        except OSError as error:
            # A full disk, no permission, a file system without locks: the question can still be answered.
            _LOG.debug("background work may not notice this request: %s", error)

    def close(self) -> None:
        """End the request; closing twice is fine."""
        self._close()
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ActiveRequests:
    """The running requests that lock the file at `path`; the first one creates the file.

    Those of `activity` count too: they use the same model.
    """

    def __init__(self, path: Path, activity: ProcessActivity | None = None) -> None:
        self._path, self._activity = path, activity
        self._descriptor: int | None = None

    def start(self) -> ActiveRequest:
        """Start a user's request."""
        return ActiveRequest(self._path, self._activity)

    @property
    def any_active(self) -> bool:
        """Whether a request is running; takes microseconds."""
        if self._activity is not None and self._activity.any_active:
            return True
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
    def idle_s(self) -> float:
        """Seconds since a request last started or ended; infinite if there was none."""
        here = float("inf") if self._activity is None else self._activity.idle_s
        try:
            return min(here, max(0.0, time.time() - self._path.stat().st_mtime))
        except FileNotFoundError:
            return here

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


class BackgroundStopped(Exception):
    """The caller asked the background work to end."""


class RequestGuard:
    """Preempts background work: users' requests come first, then a quiet period.

    Args:
        requests: the users' requests.
        quiet_s: how long no request must have run before work continues.
        stop: set by the caller to end the work; it then ends between two layers.
        patience_s: work beside requests for a quarter of this, after they have left no pause for so long; None waits for ever.
    """

    def __init__(
        self,
        requests: ActiveRequests | ProcessActivity,
        quiet_s: float,
        stop: threading.Event,
        patience_s: float | None = None,
    ) -> None:
        self._requests = requests
        self._quiet_s = quiet_s
        self._stop = stop
        self._patience_s, self._beside_until_s = patience_s, 0.0
        self.flops = 0
        self.waited_s = 0.0

    def stop_requested(self) -> bool:
        """Return whether a user's request is running, or the work is to end."""
        return self._stop.is_set() or (self._requests.any_active and time.monotonic() >= self._beside_until_s)

    def wait_for_requests(self) -> None:
        """Wait until no request has run for `quiet_s`; raises BackgroundStopped if the work is to end."""
        began = time.perf_counter()
        while self._requests.any_active or self._requests.idle_s < self._quiet_s:
            if self._stop.wait(POLL_S):
                break
            if self._patience_s is not None and time.perf_counter() - began > self._patience_s:
                self._beside_until_s = time.monotonic() + self._patience_s / 4
                break
        self.waited_s += time.perf_counter() - began
        if self._stop.is_set():
            raise BackgroundStopped

    def yield_to_requests(self) -> None:
        """Wait for requests if there are any."""
        if self.stop_requested():
            self.wait_for_requests()

    def pause(self, seconds: float) -> None:
        """Wait for something else; raises BackgroundStopped if the work is to end."""
        if self._stop.wait(seconds):
            raise BackgroundStopped

    def record_flops(self, flops: int) -> None:
        """Count the floating-point operations of a pass."""
        self.flops += flops
