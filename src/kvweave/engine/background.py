"""Idle time: works while no user asks anything, on mains power, within a daily budget, and gives way at once.

Knows nothing of what the work is.
"""

import fcntl
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from kvweave.config import IdleConfig
from kvweave.engine.background_budget import BackgroundBudget, Spent
from kvweave.engine.background_jobs import JobSource, Step
from kvweave.engine.state import Progress
from kvweave.errors import KvweaveError
from kvweave.files import alone
from kvweave.models.adapter import Adapter
from kvweave.models.preemption import Preempted


def on_mains() -> bool:
    """False only where a battery says that it is being used."""
    sensors = getattr(psutil, "sensors_battery", None)  # not on every platform
    battery = sensors() if sensors is not None else None
    return battery is None or battery.power_plugged is not False


_LOG = logging.getLogger(__name__)


class ActiveRequest:
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

    def arrive(self) -> ActiveRequest:
        """A user's request has come."""
        return ActiveRequest(self._path)

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


_POLL_S: Final = 0.02
_LOOK_AGAIN_S: Final = 5.0
"""How often a watch with nothing to do looks whether there is something."""


@dataclass(frozen=True, slots=True)
class BackgroundReport:
    """What a run did: steps by kind, seconds of work, floating-point operations, and why it ended."""

    steps: dict[str, int]
    seconds: float
    flops: float
    ended: str


class BackgroundStopped(Exception):
    """Whoever runs the work has asked it to end."""


class RequestGuard:
    """The preemption of idle work: users' requests come first, and after them a quiet while.

    Args:
        requests: those of users.
        quiet_s: how long it has to be quiet before work goes on.
        stop: set by whoever wants the work to end; it then ends between two layers.
    """

    def __init__(self, requests: Requests, quiet_s: float, stop: threading.Event) -> None:
        self._requests = requests
        self._quiet_s = quiet_s
        self._stop = stop
        self.flops = 0
        self.waited_s = 0.0

    def wanted(self) -> bool:
        """Whether a user's request is under way, or the work is to end."""
        return self._stop.is_set() or self._requests.under_way

    def give_way(self) -> None:
        """Wait until it is quiet."""
        began = time.perf_counter()
        while self._requests.under_way or self._requests.quiet_s < self._quiet_s:
            if self._stop.wait(_POLL_S):
                break
        self.waited_s += time.perf_counter() - began
        if self._stop.is_set():
            raise BackgroundStopped

    def breathe(self) -> None:
        """Give way if that is wanted."""
        if self.wanted():
            self.give_way()

    def ran(self, flops: int) -> None:
        """Count a pass."""
        self.flops += flops


class BackgroundRunner:
    """Runs a knowledge base's idle work.

    Args:
        work: makes the work of one run, which calls what it is given between parts that run no model.
        adapter: gives the model, loaded when the first step needs it.
        requests: those of users.
        record: of what was spent.
        lock: a file that one process at a time works under.
        config: when to work, and how much.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], None]], JobSource],
        adapter: Callable[[], Adapter],
        requests: Requests,
        record: BackgroundBudget,
        lock: Path,
        config: IdleConfig,
    ) -> None:
        self._work = work
        self._adapter = adapter
        self._requests = requests
        self._record = record
        self._lock = lock
        self._config = config

    def run(
        self,
        progress: Progress = lambda stage, done, total: None,
        stop: threading.Event | None = None,
        quiet_s: float = 0.0,
    ) -> BackgroundReport:
        """Work now, until nothing is left, the day's budget is spent, or `stop` is set; yields to users all the while.

        A step that was begun is finished, so that the budget may be overdrawn by one. What fails is logged and left
        for another run.
        """
        way = RequestGuard(self._requests, quiet_s, stop or threading.Event())
        done, began = Counter[str](), time.perf_counter()
        with alone(self._lock) as here:
            ended = self._steps(way, done, progress) if here else "another process is at it already"
        seconds = time.perf_counter() - began - way.waited_s
        return BackgroundReport(dict(done), seconds, way.flops, ended)

    def watch(self, stop: threading.Event, progress: Progress = lambda stage, done, total: None) -> None:
        """Work whenever it has been quiet for `idle_quiet_s`, until `stop` is set; for a thread of its own."""
        quiet_s = self._config.idle_quiet_s
        while not stop.is_set():
            if self._requests.under_way or self._requests.quiet_s < quiet_s:
                stop.wait(min(1.0, max(_POLL_S, quiet_s - self._requests.quiet_s)))
                continue
            worked = False
            try:
                worked = any(self.run(progress, stop, quiet_s).steps.values())
            except KvweaveError as error:
                _LOG.warning("idle work has to wait: %s", error)
            # What failed is not tried again every few seconds.
            stop.wait(_LOOK_AGAIN_S if worked else max(_LOOK_AGAIN_S, quiet_s))

    def _steps(self, way: RequestGuard, done: Counter[str], progress: Progress) -> str:
        """Step after step, counted in `done` by kind; returns why they end."""
        work = self._work(way.breathe)
        try:
            while True:
                way.breathe()
                hindrance = self._hindrance()
                step = work.next() if not hindrance else None
                if step is None:
                    return hindrance or "nothing is left to do"
                progress(step.kind, done[step.kind], done[step.kind] + step.left)
                done[step.kind] += self._take(step, way)
                progress(step.kind, done[step.kind], done[step.kind] + step.left - 1)
        except BackgroundStopped:
            return "asked to end"

    def _hindrance(self) -> str:
        """Why no work may be done now; empty if it may."""
        spent, config = self._record.today(), self._config
        if config.idle_power == "mains" and not on_mains():
            return "running on battery (idle_power is mains)"
        if config.idle_seconds_per_day is not None and spent.seconds >= config.idle_seconds_per_day:
            return f"today's {config.idle_seconds_per_day:g} s are spent (idle_seconds_per_day)"
        if config.idle_flops_per_day is not None and spent.flops >= config.idle_flops_per_day:
            return f"today's {config.idle_flops_per_day:.3g} FLOPs are spent (idle_flops_per_day)"
        return ""

    def _take(self, step: Step, way: RequestGuard) -> int:
        """Do one step; 1 if that worked, else 0. What it took counts either way."""
        began, waited, flops = time.perf_counter(), way.waited_s, way.flops
        finished = 0
        try:
            with self._adapter().low_priority(way):
                self._through(step)
            finished = 1
        except KvweaveError as error:
            _LOG.warning("idle work left undone (%s, %s): %s", step.kind, step.about, error)
        finally:
            seconds = time.perf_counter() - began - (way.waited_s - waited)
            self._record.add(step.kind, Spent(finished, seconds, way.flops - flops))
        return finished

    def _through(self, step: Step) -> None:
        while True:
            try:
                step.do()
            except Preempted:
                continue  # from its beginning: a pass of it could not go on
            return
