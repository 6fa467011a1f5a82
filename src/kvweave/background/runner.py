"""Background work: runs jobs while no user asks anything, on mains power, at low load, within a daily budget.

A request stops it between two layers of a pass. Knows nothing of what the jobs are.
"""

import logging
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvweave.answering.ask import Asker
from kvweave.background.conditions import (
    OwnLoad,
    budget_condition,
    conditions,
    first_reason,
    machine_state,
    power_condition,
)
from kvweave.background.jobs import Job, JobSource
from kvweave.errors import KvweaveError
from kvweave.files import try_lock
from kvweave.models.gguf.conversions import reporting
from kvweave.models.preemption import Preempted
from kvweave.remote.model import preparing_model
from kvweave.state.active_requests import POLL_S, ActiveRequests, BackgroundStopped, RequestGuard
from kvweave.state.background_budget import Spent
from kvweave.state.knowledge_base_state import KnowledgeBaseState, Progress, no_progress

if TYPE_CHECKING:
    from kvweave.documents.chunk_preparation import ChunkPreparer

_LOG = logging.getLogger(__name__)
IDLE_POLL_S: Final = 5.0
"""How often `watch` looks for jobs when there were none."""
_PREPARE_POLL_S: Final = 1.0
"""How often it looks whether documents were added that are to be prepared."""
_PREPARATION: Final = "preparation"
_PATIENCE_S: Final = 60.0
"""How long requests that leave no pause keep a server from preparing documents."""


@dataclass(frozen=True, slots=True)
class BackgroundReport:
    """What a run did: finished jobs by kind, seconds of work, floating-point operations, and why it ended."""

    jobs: dict[str, int]
    seconds: float
    flops: float
    ended: str


@dataclass(eq=False)
class BackgroundRunner:
    """Runs a knowledge base's background jobs, when and as much as its settings say, between the users' `requests`.

    The work of `preparer` comes first and is not part of the budget: a user waits for it. `own_load` is this process's part of the
    machine's load.
    """

    state: KnowledgeBaseState
    asker: Asker
    requests: ActiveRequests
    preparer: "ChunkPreparer"
    own_load: OwnLoad = field(default_factory=OwnLoad)

    def run(
        self,
        progress: Progress = no_progress,
        stop: threading.Event | None = None,
        quiet_s: float = 0.0,
        *,
        low_load: bool = False,
    ) -> BackgroundReport:
        """Work now, until nothing is left, the day's budget is spent, or `stop` is set; yield to requests throughout.

        With `low_load`, also stop when other programs need the machine, and after one hour a day unless the settings give a
        budget.
        A started job is finished, so one job may overdraw the budget. A job that fails is logged and left for another
        run.
        """
        guard = RequestGuard(self.requests, quiet_s, stop or threading.Event())
        done, began = Counter[str](), time.perf_counter()
        if self.preparer.due and not self._unfit(low_load):
            with suppress(BackgroundStopped):  # the jobs end likewise
                if prepared := self.preparer.work(guard, progress, wait=False).chunks:
                    done[_PREPARATION] = prepared
        with try_lock(self.state.idle_lock) as locked, reporting(progress):
            ended = (
                self._run_jobs(guard, done, progress, low_load)
                if locked
                else "another process is already running background jobs"
            )
        seconds = time.perf_counter() - began - guard.waited_s
        return BackgroundReport(dict(done), seconds, guard.flops, ended)

    def watch(self, stop: threading.Event, progress: Progress = no_progress) -> None:
        """Work at low load when no request has run for `idle_quiet_s`, until `stop` is set; for a thread of its own.

        Documents that were added are prepared at once, between the requests.
        """
        quiet_s, jobs_at_s, prepare_at_s = self.asker.settings.config.idle.idle_quiet_s, 0.0, 0.0
        while not stop.is_set():
            pause_s = _PREPARE_POLL_S
            try:
                if time.monotonic() >= prepare_at_s and self.preparer.due:
                    guard = RequestGuard(self.requests, 0.0, stop, _PATIENCE_S)
                    self.preparer.work(guard, progress, wait=False)
                    if self.preparer.due:  # the disk is full, or another process prepares the chunks
                        prepare_at_s = time.monotonic() + max(IDLE_POLL_S, quiet_s)
                if self.requests.any_active or self.requests.idle_s < quiet_s:
                    pause_s = min(pause_s, max(POLL_S, quiet_s - self.requests.idle_s))
                elif time.monotonic() >= jobs_at_s:
                    # A job that failed is not tried again every few seconds.
                    jobs_at_s = time.monotonic() + max(IDLE_POLL_S, quiet_s)
                    if any(self.run(progress, stop, quiet_s, low_load=True).jobs.values()):
                        jobs_at_s = time.monotonic() + IDLE_POLL_S
            except BackgroundStopped:
                return
            except KvweaveError as error:
                _LOG.warning("background work has to wait: %s", error)
                pause_s = max(IDLE_POLL_S, quiet_s)
            except Exception:  # of the model or the disk: requests may succeed, and a later try
                _LOG.exception("background work failed and has to wait")
                pause_s = max(IDLE_POLL_S, quiet_s)
            stop.wait(pause_s)

    def _run_jobs(self, guard: RequestGuard, done: Counter[str], progress: Progress, low_load: bool) -> str:
        """Run job after job, counted in `done` by kind; return why they end."""
        with closing(JobSource(self.state, self.asker, guard)) as jobs:
            try:
                while True:
                    guard.yield_to_requests()
                    blocked = self._blocked_reason(low_load)
                    job = jobs.next() if not blocked else None
                    if job is None:
                        return blocked or "nothing is left to do"
                    progress(job.kind, done[job.kind], done[job.kind] + job.left)
                    done[job.kind] += self._run_job(job, guard)
                    progress(job.kind, done[job.kind], done[job.kind] + job.left - 1)
            except BackgroundStopped:
                return "asked to end"

    def _blocked_reason(self, low_load: bool) -> str:
        """Return the reason not to work now, or an empty string."""
        if without := self.preparer.without_vector:  # what jobs retrieved now would soon be out of date
            return f"{without} chunks have no vector yet"
        budget = budget_condition(
            self.asker.settings.config.idle, self.state.background_budget.today(), asked_for=not low_load
        )
        return self._unfit(low_load) or budget.reason

    def _unfit(self, low_load: bool) -> str:
        """Return the reason not to work now other than the budget, or an empty string."""
        config = self.asker.settings.config.idle
        return first_reason(
            conditions(config, machine_state(self.own_load)) if low_load else [power_condition(config)]
        )

    def _run_job(self, job: Job, guard: RequestGuard) -> int:
        """Run one job; return 1 if it finished, else 0. What it cost counts either way."""
        began, waited, flops = time.perf_counter(), guard.waited_s, guard.flops
        finished = 0
        try:
            with preparing_model(self.asker.components.model).low_priority(guard):
                _run_to_end(job)
            finished = 1
        except KvweaveError as error:
            _LOG.warning("background work left undone (%s, %s): %s", job.kind, job.about, error)
        finally:
            seconds = time.perf_counter() - began - (guard.waited_s - waited)
            self.state.background_budget.add(job.kind, Spent(finished, seconds, guard.flops - flops))
        return finished


def _run_to_end(job: Job) -> None:
    while True:
        try:
            job.do()
        except Preempted:
            continue  # start over: one of its passes could not be resumed
        return
