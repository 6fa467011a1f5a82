"""Prompts shared out among processes.

A small model's passes are too short to keep several threads busy: one process for each core, with a thread of its own,
answers more prompts in the same time. The processes only fill the journal; whoever evaluates reads it afterwards.
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

import psutil
import torch
from tqdm import tqdm

from kvweave.errors import EvaluationStopped
from kvweave.models.adapter import Adapter
from kvweave_lab.eval.faithfulness import Judge
from kvweave_lab.eval.grid import Case, Progress, candidates
from kvweave_lab.eval.journal import Journal
from kvweave_lab.eval.results import FULL, Label, Outcome
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.suites import Suite

SMALL_PARAMETERS = 20_000_000
"""Up to here a core of its own is taken to gain a prompt more than a second core gains a pass."""

MOST_PROCESSES = 8
"""As many as start where nobody says how many."""

PROCESS_BYTES = 1_000_000_000
"""What each of them should find free: 0.8 GB of libraries and caches beside the model."""

WORTHWHILE_PROMPTS = 16
"""What a process has to answer to be worth the seconds in which it starts."""


@dataclass(frozen=True, slots=True)
class Crew:
    """Who answers.

    Attributes:
        load: makes the model's adapter once more, in each process: a function of a module, or a partial of one.
        processes: how many, each with its share of the threads that PyTorch has here; None is one for each of those threads
            where the model is small and on the CPU (at most MOST_PROCESSES, none with fewer than
            WORTHWHILE_PROMPTS prompts or PROCESS_BYTES of memory), and otherwise this one alone.
    """

    load: Callable[[], Adapter]
    processes: int | None = None

    def size(self, adapter: Adapter, prompts: int) -> int:
        """How many processes answer so many prompts."""
        if self.processes is not None:
            return min(self.processes, prompts)
        if adapter.geometry.device.type != "cpu" or adapter.model.num_parameters() > SMALL_PARAMETERS:
            return 1
        room: int = psutil.virtual_memory().available // PROCESS_BYTES
        return max(1, min(torch.get_num_threads(), MOST_PROCESSES, room, prompts // WORTHWHILE_PROMPTS))


@dataclass(frozen=True, slots=True)
class Work:
    """What every process has to know. All of it is pickled: a judge of one's own has to be of a module, or of a script that begins
    its work under `if __name__ == "__main__"`.
    """

    suite: Suite
    judge: Judge | None
    batch: int


def fill(
    journal: Journal,
    cases: Sequence[Case],
    among: Sequence[Candidate],
    adapter: Adapter,
    crew: Crew,
    work: Work,
    progress: Progress = lambda stage, done, of: None,
) -> None:
    """Have a crew answer what the journal lacks, and write it down prompt by prompt; nothing where one process would.

    Raises EvaluationStopped when a process ends before its time, and whatever a prompt raises there. What was answered
    until then is kept.
    """
    labels = [(FULL, 1.0, None), *(candidate.label for candidate in among)]
    lacking = [
        (case, missing)
        for case in cases
        if (missing := [label for label in labels if journal.get((case.sample.name, label)) is None])
    ]
    processes = crew.size(adapter, len(lacking))
    if processes < 2:
        return
    done = len(cases) - len(lacking)
    progress("prompts", done, len(cases))
    with closing(_answered(lacking, processes, crew.load, work)) as answered:
        for missing, outcomes in answered:
            for outcome in outcomes:
                if outcome.label in missing:
                    journal.add(outcome)
            done += 1
            progress("prompts", done, len(cases))


def _answered(
    lacking: Sequence[tuple[Case, list[Label]]], processes: int, load: Callable[[], Adapter], work: Work
) -> Generator[tuple[list[Label], list[Outcome]], None, None]:
    """What was missing of each prompt and its outcomes, in the order in which prompts are finished."""
    context = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
    threads = max(1, torch.get_num_threads() // processes)
    theirs, leash = context.Pipe(duplex=False)
    with (
        theirs,
        leash,
        ProcessPoolExecutor(processes, context, _begin, (theirs, load, work, threads)) as pool,
    ):
        try:
            with _deaf_to_interrupts():  # a Ctrl-C is ours; processes start as they are given work
                tasks: dict[Future[list[Outcome]], list[Label]] = {
                    pool.submit(_answer, case, missing): missing for case, missing in lacking
                }
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        except BaseException as error:
            leash.close()  # whoever still computes stops now
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, BrokenProcessPool):
                raise
            raise EvaluationStopped(
                "a process of the evaluation ended before its time, which is what happens when memory runs out; run the same"
                " command again with fewer (--processes 1): with --output, it goes on where it stopped"
            ) from error


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that start in this context never see a Ctrl-C; one that comes meanwhile reaches this one afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_here: tuple[Runner, dict[Label, Candidate]] | Exception
"""In a process of the crew: what it answers with, or why it cannot."""


def _begin(leash: Connection, load: Callable[[], Adapter], work: Work, threads: int) -> None:
    """The start of a process that lives no longer than the one that holds the other end of the leash."""
    global _here
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()
    tqdm.set_lock(
        threading.RLock()
    )  # its own is a semaphore of the system, which a sudden end would leave behind
    torch.set_num_threads(threads)
    try:
        runner = Runner(load(), Journal(None, {}), work.judge, work.batch)
        _here = runner, {candidate.label: candidate for candidate in candidates(work.suite)}
    except Exception as error:  # raised to whoever asks; here, it would end the process without a word
        _here = error


def _end_with(leash: Connection) -> None:
    wait([leash])  # nothing is ever sent: it is closed, by its owner or by the owner's death
    os._exit(0)


def _answer(case: Case, labels: Sequence[Label]) -> list[Outcome]:
    if isinstance(_here, Exception):
        raise _here
    runner, among = _here
    chosen = [among[label] for label in labels if label in among]
    return list(runner.outcomes(case.sample, chosen, case.context_tokens, case.seed))
