"""Loads: each reads one entry, in the background or in the thread that needs it first, once for all who want it.

A thread waits only for loads that it asked for. If one of them has not begun, the thread does it itself, whatever else is queued.
A load that no request wants any more is not begun; one that is running can ask. Knows nothing about what is loaded. A load ends
as soon as its entry can be used: for a file when it is mapped, for a server when the beginning has arrived (`fetching.py`).
The entry's layers are read and verified one by one later on.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Literal, TypeVar

from kvweave.machine import use_one_thread

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
IsWanted = Callable[[], bool]
"""Whether any request still wants the result of a load."""

THREADS = 4
"""Enough to keep a disk's queue or a few connections busy; threads that wait for a load work too."""


class AbandonedError(Exception):
    """Raised by a load that no request wants any more."""


class Load(Generic[Result]):
    """One load; loads of one name are the same load."""

    def __init__(self, name: Hashable, work: Callable[[IsWanted], Result]) -> None:
        self.name = name
        self.work = work
        self.wanted_by = 0
        self.state: Literal["queued", "running", "done"] = "queued"
        self.result: Result | None = None
        self.error: Exception | None = None


class Loader(Generic[Result]):
    """Runs loads on a few threads, which start when the first load is queued."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._loads: dict[Hashable, Load[Result]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def start(
        self, name: Hashable, work: Callable[[IsWanted], Result], *, inline: bool = False
    ) -> Load[Result]:
        """Ask for a load: the pending one of this name, or a new one.

        Args:
            name: identifies what is loaded.
            work: loads it; may ask now and then whether the result is still wanted, and raise AbandonedError if not.
            inline: leave the load to a thread that waits for it; no background thread begins it.

        Returns:
            The load, to be passed to `wait` or `cancel`, once.
        """
        with self._changed:
            load = self._loads.get(name)
            if load is None:
                load = self._loads[name] = Load(name, work)
            load.wanted_by += 1
            if not inline and not self._closed and load.state == "queued":
                self._submit(self._run, load)
        return load

    def wait(self, loads: Sequence[Load[Result]]) -> list[Result]:
        """Return the results of these loads, or raise the first error; the caller wants the loads no longer."""
        try:
            for load in loads:
                self._run(load)
            for load in loads:
                self._finish(load)
        finally:
            self.cancel(loads)
        return [self._outcome(load) for load in loads]

    def cancel(self, loads: Sequence[Load[Result]]) -> None:
        """Record that the caller wants these no longer."""
        with self._changed:
            for load in loads:
                load.wanted_by -= 1
                if load.wanted_by <= 0 and load.state != "running":
                    self._forget(load)

    def discard_result(self, name: Hashable) -> None:
        """Make the next request for this name start a new load."""
        with self._changed:
            self._loads.pop(name, None)

    def run_later(self, task: Callable[[], None]) -> None:
        """Run a task in the background; its errors are logged."""
        with self._changed:
            if not self._closed:
                self._submit(_run_logged, task)

    def close(self) -> None:
        """Take no more work and wait for the tasks in the background; loads that no request wants are left out."""
        with self._changed:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    @property
    def pending(self) -> int:
        """How many loads are queued, running, or finished and not yet fetched."""
        return len(self._loads)

    def _submit(self, function: Callable[..., None], argument: object) -> None:
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "kvweave-load", use_one_thread)
        self._pool.submit(function, argument)

    def _finish(self, load: Load[Result]) -> None:
        while load.state != "done":
            with self._changed:
                self._changed.wait_for(lambda: load.state != "running")
            self._run(load)  # the thread that ran it was interrupted

    def _run(self, load: Load[Result]) -> None:
        """Do a load, unless another thread does or did."""
        with self._changed:
            if load.state != "queued" or load.wanted_by <= 0:
                return
            load.state = "running"
        # After an interrupt of this thread, others may still want the load.
        state: Literal["queued", "done"] = "queued"
        try:
            load.result = load.work(lambda: load.wanted_by > 0)
            state = "done"
        except AbandonedError:
            pass  # a request that has come to want it since starts it again
        except Exception as error:
            load.error, state = error, "done"
        finally:
            with self._changed:
                load.state = state
                if load.wanted_by <= 0:
                    self._forget(load)
                self._changed.notify_all()

    def _forget(self, load: Load[Result]) -> None:
        if self._loads.get(load.name) is load:
            del self._loads[load.name]

    @staticmethod
    def _outcome(load: Load[Result]) -> Result:
        if load.error is not None:
            raise load.error
        return load.result  # type: ignore[return-value]  # done, and not failed


def _run_logged(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:
        _LOG.warning("work in the background failed", exc_info=True)
