"""Worker processes share prompts: the same outcomes as from one process, and none left after a failure."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvweave.errors import ModelNotFound, PromptTooLong
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.grid import SUITES, Case, candidates_of, evaluate
from kvweave_lab.eval.outcomes import OutcomeLog
from kvweave_lab.eval.runner import Runner
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.workers import (
    MOST_PROCESSES,
    PROCESS_BYTES,
    WORTHWHILE_PROMPTS,
    EvaluationStopped,
    Workers,
    WorkerTask,
    fill_log,
)
from lab_support.outcomes import OUTCOME
from support.processes import child_processes

SUITE = replace(SUITES["quick"], recipes=("naive", "prophetkv"), ratios=(0.5,))
CANDIDATES = candidates_of(SUITE)


class Deadly:
    """A judge that ends its process at an answer to the second prompt."""

    name = "deadly"

    def share(self, answer, chunks):
        if chunks[0] == "Case 1.":
            os._exit(9)
        return 1.0


class Slow:
    """A judge that creates a file when it begins, and takes longer than a test."""

    name = "slow"

    def __init__(self, folder: Path):
        self.folder = folder

    def share(self, answer, chunks):
        (self.folder / str(os.getpid())).touch()
        time.sleep(600)


def case(number: int, question: str = "Where?") -> Case:
    chunks = (f"Case {number}.", "The inn is in the north.", "Or there.")
    return Case(Sample(f"file/{number}", "file", chunks, question, ("x",), "f1", 2), 0, number)


CASES = [case(number) for number in range(5)]


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


def filled(log, adapter, cases=CASES, judge=None, progress=lambda *done: None, load=tiny_adapter):
    fill_log(log, cases, CANDIDATES, adapter, Workers(load, 2), WorkerTask(SUITE, judge, 8), progress)


def everything(log, cases=CASES):
    """Every outcome in the log without its time; None for a missing one."""
    labels = [("full", 1.0, None), *(candidate.label for candidate in CANDIDATES)]
    found = [log.get((case.sample.name, label)) for case in cases for label in labels]
    return [outcome and replace(outcome, took_s=0.0) for outcome in found]


def test_two_processes_compute_the_same_as_one_and_only_missing_outcomes(adapter, tmp_path):
    events = []
    with OutcomeLog(tmp_path, {}) as log:
        evaluate(CASES[:1], 1, CANDIDATES, Runner(adapter, log))
        known = replace(OUTCOME, sample="file/1", recipe="naive", ratio=0.0, answer="was there before")
        log.add(known)
        filled(log, adapter, progress=lambda *done: events.append(done))
        together = everything(log)
        assert log.get(("file/1", known.label)) == known
    assert events == [("prompts", done, 5) for done in (1, 2, 3, 4, 5)]
    alone = OutcomeLog(None, {})
    evaluate(CASES, 5, CANDIDATES, Runner(adapter, alone))
    alone.add(known)
    assert together == everything(alone)
    assert None not in together
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(together)  # no outcome twice
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_reported_and_earlier_outcomes_stay(adapter, tmp_path):
    with (
        OutcomeLog(tmp_path, {}) as log,
        pytest.raises(EvaluationStopped, match="memory runs out; run the same command again with fewer"),
    ):
        filled(log, adapter, judge=Deadly())
    assert not multiprocessing.active_children()
    with OutcomeLog(tmp_path, {}) as log:
        evaluate(CASES, 5, CANDIDATES, Runner(adapter, log))  # resumes in one process
        assert None not in everything(log)


def test_an_error_in_a_worker_is_raised_here(adapter):
    with pytest.raises(PromptTooLong, match=r"file/7: the prompt has \d+ tokens"):
        filled(OutcomeLog(None, {}), adapter, [case(0), case(7, "Where? " * 200)])
    assert not multiprocessing.active_children()


def test_why_a_process_cannot_start_is_reported(adapter):
    with pytest.raises(ModelNotFound, match="no model here"):
        filled(OutcomeLog(None, {}), adapter, load=_no_model)
    assert not multiprocessing.active_children()


def _no_model():
    raise ModelNotFound("no model here")


def test_workers_stop_when_the_parent_is_killed(tmp_path):
    parent = child_processes().Process(target=_ask_slowly, args=(tmp_path,))
    parent.start()
    working = _eventually(lambda: len(list(tmp_path.iterdir())) == 2 and [*tmp_path.iterdir()])
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    for process in working:
        assert _eventually(partial(_ended, int(process.name)))


def _ended(process: int) -> bool:
    """Also true for a zombie, as in a container without an init."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _ask_slowly(folder: Path) -> None:
    filled(OutcomeLog(None, {}), tiny_adapter(), judge=Slow(folder))


def _eventually(holds):
    until = time.monotonic() + 300
    while not (found := holds()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


class TestCount:
    @staticmethod
    def model(parameters=1_000_000, device="cpu"):
        return SimpleNamespace(
            geometry=SimpleNamespace(device=torch.device(device)),
            model=SimpleNamespace(num_parameters=lambda: parameters),
        )

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        """Many threads, and memory for more processes than ever start."""
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
        self.free = 100 * PROCESS_BYTES
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=self.free))

    def test_a_small_model_gets_a_process_for_each_thread_up_to_a_limit(self, monkeypatch):
        assert Workers(tiny_adapter).count(self.model(), 1000) == MOST_PROCESSES
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert Workers(tiny_adapter).count(self.model(), 1000) == 2

    def test_a_few_prompts_are_not_worth_a_process(self):
        assert Workers(tiny_adapter).count(self.model(), 0) == 1
        assert Workers(tiny_adapter).count(self.model(), 2 * WORTHWHILE_PROMPTS - 1) == 1
        assert Workers(tiny_adapter).count(self.model(), 2 * WORTHWHILE_PROMPTS) == 2

    def test_there_are_no_more_than_fit_into_memory(self):
        self.free = 3 * PROCESS_BYTES + 1
        assert Workers(tiny_adapter).count(self.model(), 1000) == 3
        self.free = 0
        assert Workers(tiny_adapter).count(self.model(), 1000) == 1

    def test_large_models_and_gpus_get_one(self):
        assert Workers(tiny_adapter).count(self.model(parameters=500_000_000), 1000) == 1
        assert Workers(tiny_adapter).count(self.model(device="cuda"), 1000) == 1

    def test_as_many_as_requested_if_there_are_prompts_for_them(self):
        assert Workers(tiny_adapter, 3).count(self.model(500_000_000, "cuda"), 1000) == 3
        assert Workers(tiny_adapter, 3).count(self.model(), 2) == 2
