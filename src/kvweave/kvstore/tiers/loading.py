"""Loads: each reads one entry, in the background or by whoever needs it first, once for all who want it.

Nobody waits for a load that he did not ask for: a thread that needs one which has not begun does it itself, whatever else is
queued, and otherwise waits for that very load only. A load that nobody wants any more is not begun, and one that has begun
is told. Knows nothing about what is loaded; the unit is one entry, so far that it can be used. From a disk that is an open
mapping, from a server its beginning (`fetching.py`); layers are had and verified one by one (`models/canvas.py` says when).
"""

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Literal, TypeAlias, TypeVar

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")
Wanted = Callable[[], bool]
"""Whether anybody still wants what a load is about to give."""

Name: TypeAlias = tuple[str, Hashable]
"""What is loaded from where."""

THREADS = 4
"""Enough to keep a disk's queue or a few connections busy; whoever waits works too."""


class AbandonedError(Exception):
    """Raised by the work of a load that nobody wants any more."""


class Load(Generic[Result]):
    """One load. `name` tells what is loaded: loads of one name are the same."""

    def __init__(self, name: Name, work: Callable[[Wanted], Result]) -> None:
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
        self._loads: dict[Name, Load[Result]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def start(self, name: Name, work: Callable[[Wanted], Result], *, here: bool = False) -> Load[Result]:
        """Ask for a load: the one of this name that is under way, or a new one.

        Args:
            name: what is loaded.
            work: loads it; may ask now and then whether that is still wanted, and raise AbandonedError if not.
            here: leave it to whoever waits for it; no other thread begins it.

        Returns:
            The load, to be given to `wait` or `cancel`, once.
        """
        with self._changed:
            load = self._loads.get(name)
            if load is None:
                load = self._loads[name] = Load(name, work)
            load.wanted_by += 1
            if not here and not self._closed and load.state == "queued":
                self._pool = self._pool or ThreadPoolExecutor(self._threads, "kvweave-load")
                self._pool.submit(self._run, load)
        return load

    def wait(self, loads: Sequence[Load[Result]]) -> list[Result]:
        """The results of these loads, which are no longer wanted by the caller; raises what one of them raised."""
        try:
            for load in loads:
                self._run(load)
            for load in loads:
                self._finish(load)
        finally:
            self.cancel(loads)
        return [self._outcome(load) for load in loads]

    def cancel(self, loads: Sequence[Load[Result]]) -> None:
        """The caller wants these no longer."""
        with self._changed:
            for load in loads:
                load.wanted_by -= 1
                if load.wanted_by <= 0 and load.state != "running":
                    self._forget(load)

    def renew(self, name: Name) -> None:
        """What came of this load is no good any more: whoever asks for it from now on has it done anew."""
        with self._changed:
            self._loads.pop(name, None)

    def later(self, chore: Callable[[], None]) -> None:
        """Do something in the background that nobody waits for; what goes wrong is logged."""
        with self._changed:
            if not self._closed:
                self._pool = self._pool or ThreadPoolExecutor(self._threads, "kvweave-load")
                self._pool.submit(_logged, chore)

    def close(self) -> None:
        """Take nothing more, and wait for what is to be done in the background; loads that nobody wants are left out."""
        with self._changed:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    @property
    def under_way(self) -> int:
        """How many loads are queued or running, or finished and not yet fetched."""
        return len(self._loads)

    def _finish(self, load: Load[Result]) -> None:
        while load.state != "done":
            with self._changed:
                self._changed.wait_for(lambda: load.state != "running")
            self._run(load)  # whoever ran it was interrupted

    def _run(self, load: Load[Result]) -> None:
        """Do a load unless somebody does or did."""
        with self._changed:
            if load.state != "queued" or load.wanted_by <= 0:
                return
            load.state = "running"
        state: Literal["queued", "done"] = (
            "queued"  # after an interrupt of this thread others may still want it
        )
        try:
            load.result = load.work(lambda: load.wanted_by > 0)
            state = "done"
        except AbandonedError:
            pass  # whoever has come to want it since begins it anew
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


def _logged(chore: Callable[[], None]) -> None:
    try:
        chore()
    except Exception:
        _LOG.warning("work in the background failed", exc_info=True)
