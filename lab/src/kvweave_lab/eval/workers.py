"""Worker processes that share the prompts of an evaluation.

A small model's passes are too short to keep several threads busy. One process per core, with one thread, answers more
prompts in the same time. The workers only fill the outcome log; the caller reads the outcomes from it afterwards.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext

import psutil
import torch
from tqdm import tqdm

from kvweave.errors import KvweaveError
from kvweave.models.adapter import Adapter
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.grid import Case, Suite, candidates_of
from kvweave_lab.eval.metrics import Judge
from kvweave_lab.eval.outcomes import FULL, Label, Outcome, OutcomeLog
from kvweave_lab.eval.runner import Candidate, Runner

SMALL_PARAMETERS = 20_000_000
"""Up to this size, a prompt gains more from a core of its own than its passes gain from a second core."""

MOST_PROCESSES = 8
"""The most processes that start by default."""

PROCESS_BYTES = 1_000_000_000
"""Free memory per process: 0.8 GB of libraries and caches besides the model."""

WORTHWHILE_PROMPTS = 16
"""The prompts that a process must answer to be worth the seconds of its start."""


class EvaluationStopped(KvweaveError):
    """A worker process ended early; the answers up to then are kept."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that answer prompts.

    Attributes:
        load: loads the model in each process: a function of a module, or a partial of one.
        processes: their number; each one gets its share of PyTorch's threads. None starts one for each of those threads
            if the model is small and on the CPU (at most MOST_PROCESSES, none with fewer than WORTHWHILE_PROMPTS
            prompts or PROCESS_BYTES of memory). Otherwise the calling process answers alone.
    """

    load: Callable[[], Adapter]
    processes: int | None = None

    def count(self, adapter: Adapter, prompts: int) -> int:
        """Return how many processes answer this number of prompts."""
        if self.processes is not None:
            return min(self.processes, prompts)
        if adapter.geometry.device.type != "cpu" or adapter.model.num_parameters() > SMALL_PARAMETERS:
            return 1
        room: int = psutil.virtual_memory().available // PROCESS_BYTES
        return max(1, min(torch.get_num_threads(), MOST_PROCESSES, room, prompts // WORTHWHILE_PROMPTS))


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What every worker needs to know, pickled.

    A custom judge must be importable: from a module, or from a script that starts its work under
    `if __name__ == "__main__"`.
    """

    suite: Suite
    judge: Judge | None
    batch: int


def fill_log(
    log: OutcomeLog,
    cases: Sequence[Case],
    candidates: Sequence[Candidate],
    adapter: Adapter,
    workers: Workers,
    task: WorkerTask,
    progress: Progress = no_progress,
) -> None:
    """Let workers compute what the log lacks, and add it prompt by prompt; does nothing if one process would do it.

    Raises EvaluationStopped if a worker dies, and whatever a prompt raises in a worker. The log keeps earlier outcomes.
    """
    labels = [(FULL, 1.0, None), *(candidate.label for candidate in candidates)]
    unfinished = [
        (case, missing)
        for case in cases
        if (missing := [label for label in labels if log.get((case.sample.name, label)) is None])
    ]
    processes = workers.count(adapter, len(unfinished))
    if processes < 2:
        return
    done = len(cases) - len(unfinished)
    progress("prompts", done, len(cases))
    with closing(_computed(unfinished, processes, workers.load, task)) as computed:
        for missing, outcomes in computed:
            for outcome in outcomes:
                if outcome.label in missing:
                    log.add(outcome)
            done += 1
            progress("prompts", done, len(cases))


def _computed(
    unfinished: Sequence[tuple[Case, list[Label]]],
    processes: int,
    load: Callable[[], Adapter],
    task: WorkerTask,
) -> Generator[tuple[list[Label], list[Outcome]], None, None]:
    """Yield the missing labels and the outcomes of each prompt, in the order in which prompts finish."""
    context = _context()
    threads = max(1, torch.get_num_threads() // processes)
    theirs, lifeline = context.Pipe(duplex=False)
    with (
        theirs,
        lifeline,
        ProcessPoolExecutor(processes, context, _start_worker, (theirs, load, task, threads)) as pool,
    ):
        try:
            with _interrupts_blocked():  # processes start when they receive work
                futures: dict[Future[list[Outcome]], list[Label]] = {
                    pool.submit(_compute, case, missing): missing for case, missing in unfinished
                }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            lifeline.close()  # workers that still compute stop now
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, BrokenProcessPool):
                raise
            raise EvaluationStopped(
                "a process of the evaluation ended before its time, which is what happens when memory runs out; run the same"
                " command again with fewer (--processes 1): with --output, it resumes where it stopped"
            ) from error


def _context() -> BaseContext:
    """Return the way to start workers. PyTorch's threads do not survive a fork of this process, but a server can import and fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils"])
    return context


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C: processes that start in this context never see it, this process sees it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Runner, dict[Label, Candidate]] | Exception
"""In a worker process: its runner and candidates, or why it has none."""


def _start_worker(lifeline: Connection, load: Callable[[], Adapter], task: WorkerTask, threads: int) -> None:
    """Start a worker that lives no longer than the process at the other end of the lifeline."""
    global _worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # where the context could not
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a system semaphore, which a sudden end would leave behind
    torch.set_num_threads(threads)
    try:
        runner = Runner(load(), OutcomeLog(None, {}), task.judge, task.batch)
        _worker = runner, {candidate.label: candidate for candidate in candidates_of(task.suite)}
    except (
        Exception
    ) as error:  # raised with the first prompt; here, it would end the process without a message
        _worker = error


def _end_with(lifeline: Connection) -> None:
    wait([lifeline])  # nothing is ever sent: its owner closes it, or dies
    os._exit(0)


def _compute(case: Case, labels: Sequence[Label]) -> list[Outcome]:
    if isinstance(_worker, Exception):
        raise _worker
    runner, candidates = _worker
    chosen = [candidates[label] for label in labels if label in candidates]
    return list(runner.outcomes(case.sample, chosen, case.context_tokens, case.seed))
