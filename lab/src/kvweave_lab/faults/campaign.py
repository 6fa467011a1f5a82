"""The campaign: histories with seeds, in processes forked from one that has everything loaded; results go to a log that resumes."""

import importlib
import json
import logging
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import count
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any, Final

import torch

from kvweave_lab.faults import crashes, damage, errors, shared
from kvweave_lab.faults.checks import Broken
from kvweave_lab.faults.disk import Loss
from kvweave_lab.faults.homes import adapter
from kvweave_lab.faults.workload import NAMES, draw
from kvweave_lab.results_log import ResultsLog

KINDS: Final = ("crash", "error", "damage", "entries", "shared")
_ENTRY_ROUNDS: Final = 25
"""For each round of damage to a whole home: an entry is checked much faster."""
VERSION: Final = 1
_LOADED: Final = (
    "kvweave.answering.pipeline",
    "kvweave.background.jobs",
    "kvweave.background.runner",
    "kvweave.chat",
    "kvweave.documents.indexing",
    "kvweave.index.vector_index",
    "kvweave.recipes.methods",
    "kvweave.recipes.offline",
)
"""Imported before the forks, none of which runs LanceDB's threads before it forks again."""
_ONE_AT_A_TIME: Final = frozenset({"chat", "limit", "idle"})
"""What a second process does not do: the order of two would not be known, or one of them would be refused."""
_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class History:
    """One history: a workload with its faults.

    Attributes:
        kind: a kind of `KINDS`.
        seed: repeats it.
        checked: how many homes were checked, by fault.
        broken: fault, invariant and detail of each home in which an invariant did not hold.
        seconds: how long it took.
    """

    kind: str
    seed: int
    checked: dict[str, int]
    broken: list[list[str]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Size:
    """How much a history does.

    Attributes:
        steps: of a workload.
        crashes: the chance that a crash is checked, by what it takes.
        thorough: the chance that a check of a crash is thorough.
        rounds: how many damaged homes are checked.
    """

    steps: int
    crashes: tuple[float, float, float]
    thorough: float
    rounds: int


SHORT: Final = Size(3, (0.006, 0.02, 0.005), 0.25, 2)
LONG: Final = Size(4, (0.02, 0.08, 0.03), 0.25, 12)
EVERY: Final = Size(3, (1.0, 1.0, 1.0), 0.15, 200)


def run_history(kind: str, seed: int, size: Size, place: Path) -> History:
    """Run one history in `place`, an own folder."""
    began, random, checked, broken = time.monotonic(), Random(seed), Counter[str](), list[list[str]]()
    root = place / "root"

    def report(fault: str, invariant: str, detail: str) -> None:
        with found.open("a") as lines:
            lines.write(json.dumps([fault, invariant, detail]) + "\n")

    place.mkdir(parents=True, exist_ok=True)
    found = place / "found"
    found.write_text("")
    try:
        if kind == "crash":
            two = seed % 4 == 3
            halves = ((NAMES[:2], 1), (NAMES[2:], 31)) if two else ((NAMES, 1),)
            plans = [draw(random, size.steps, names, first) for names, first in halves]
            plans[1:] = [[step for step in plan if step.kind not in _ONE_AT_A_TIME] for plan in plans[1:]]
            crashes.check_all(
                root, plans, random, lambda loss: size.crashes[list(Loss).index(loss)], size.thorough, report
            )
        elif kind == "error":
            errors.check_all(root, 2 * size.steps, random, report)
        elif kind == "entries":
            damage.check_entries(root, _ENTRY_ROUNDS * size.rounds, random, report)
        elif kind == "shared":
            shared.check_all(root, 2 * size.rounds, random, report)
        else:
            damage.check_all(root, size.steps, size.rounds, random, report)
    except Broken as error:
        broken.append(["none", error.invariant, str(error.detail)])
    for line in found.read_text().splitlines():
        fault, invariant, detail = json.loads(line)
        checked[fault] += 1
        if invariant:
            broken.append([fault, invariant, detail[:600]])
    shutil.rmtree(place, ignore_errors=True)
    return History(kind, seed, dict(checked), broken, time.monotonic() - began)


def summary(histories: Sequence[History], command: str) -> dict[str, Any]:
    """Return what the histories have checked and found, as JSON values."""
    checked, broken = Counter[str](), Counter[tuple[str, str]]()
    seeds = {kind: sorted(each.seed for each in histories if each.kind == kind) for kind in KINDS}
    for history in histories:
        checked.update(history.checked)
        broken.update((fault, invariant) for fault, invariant, _ in history.broken)
    return {
        "command": command,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seeds": seeds,
        "homes": sum(checked.values()),
        "homes_by_fault": dict(sorted(checked.items())),
        "broken": [
            {"fault": fault, "invariant": invariant, "homes": number}
            for (fault, invariant), number in sorted(broken.items())
        ],
    }


def load() -> None:
    """Load what all histories need, before any fork."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "lancedb fork support")  # no process that forks runs work of LanceDB
    logging.getLogger("kvweave").setLevel(logging.ERROR)
    for module in _LOADED:
        importlib.import_module(module)
    adapter()


def run(
    kinds: Sequence[str],
    first_seed: int,
    size: Size,
    processes: int,
    until: Callable[[int], bool],
    output: Path | None,
) -> Iterator[History]:
    """Yield each history as it ends, those of an earlier run with the same `output` first; `until` is asked before each new one.

    Raises InvalidRequest for an output of another configuration.
    """
    load()
    log: ResultsLog[tuple[str, int], History] = ResultsLog(
        output,
        {"steps": size.steps, "crashes": list(size.crashes), "rounds": size.rounds},
        file="histories.jsonl",
        version=VERSION,
        key=lambda history: (history.kind, history.seed),
        parse=lambda line: History(**line),
    )
    with log, tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        yield from log.results
        wanted = (
            (kind, seed) for seed in count(first_seed) for kind in kinds if log.get((kind, seed)) is None
        )
        for history in _parallel(wanted, size, processes, until, Path(folder)):
            log.add(history)
            yield history


def _parallel(
    wanted: Iterator[tuple[str, int]], size: Size, processes: int, until: Callable[[int], bool], folder: Path
) -> Iterator[History]:
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()
    running = dict[int, Any]()
    begun = 0
    while True:
        while len(running) < processes and not until(begun):
            kind, seed = next(wanted)
            task = fork.Process(target=_task, args=(results, begun, kind, seed, size, folder / str(begun)))
            task.start()
            running[begun] = task
            begun += 1
        if not running:
            return
        try:
            number, history = results.get(timeout=5)
        except Empty:
            if not any(task.is_alive() for task in running.values()):
                raise RuntimeError("a process that runs histories ended without a result") from None
            continue
        running.pop(number).join()
        yield history


def _task(results: Any, number: int, kind: str, seed: int, size: Size, place: Path) -> None:
    results.put((number, run_history(kind, seed, size, place)))
    results.close()
    results.join_thread()
    os._exit(0)
