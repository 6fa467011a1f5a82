"""Processes that are killed at random moments, many a second: forked from one that has everything loaded."""

import gc
import importlib
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from support.processes import child_processes

PATIENCE_S = 500.0
"""How long loading may take on a busy machine."""

AT_MOST_S = 200.0
"""How long anything runs until it is killed, acknowledged or not."""

LOADED = (
    "kvweave.testing",
    "kvweave.api",
    "kvweave.recipes.offline",
    "kvweave.recipes.methods",
    "kvweave.kvstore.chunk_store",
)
"""Imported once, before the forks."""

Acknowledge = Callable[[str], None]
"""Writes a line to disk; it stays even if the process is killed afterwards."""


class Victims:
    """Runs `work(loaded, acknowledge, *given)`, kills it somewhere, and tells what it had acknowledged."""

    def __init__(self, pipe: Connection, lines: Path, moments: random.Random) -> None:
        self._pipe = pipe
        self._lines = lines
        self._moments = moments
        self.killed = 0

    def killed_within(self, most: int, *given: Any) -> list[str]:
        """Run the work until a random moment at which it has acknowledged no more than about `most` lines; returns them."""
        self._lines.unlink(missing_ok=True)
        lines, share = self._moments.randrange(most), self._moments.uniform(0, 1.2)
        self._pipe.send((lines, share, str(self._lines), given))
        assert self._pipe.poll(PATIENCE_S), "the process that forks does not answer"
        status = self._pipe.recv()
        assert os.WIFSIGNALED(status), (
            f"it ended by itself, with exit code {os.waitstatus_to_exitcode(status)}"
        )
        assert os.WTERMSIG(status) == signal.SIGKILL
        self.killed += 1
        told = _acknowledged(self._lines)
        assert len(told) >= lines
        return told


@contextmanager
def victims(folder: Path, load: Callable[[], Any], work: Callable[..., None], seed: int) -> Iterator[Victims]:
    """`load` and `work` are functions of a module. `load` runs once; every fork gets its result."""
    ours, theirs = multiprocessing.Pipe()
    forking = child_processes().Process(target=_fork_and_kill, args=(theirs, load, work))
    forking.start()
    theirs.close()
    try:
        yield Victims(ours, folder / "acknowledged.txt", random.Random(seed))
    finally:
        ours.close()
        forking.join(PATIENCE_S)
        forking.close()


def _fork_and_kill(pipe: Connection, load: Callable[[], Any], work: Callable[..., None]) -> None:
    torch.set_num_threads(1)  # no threads that a fork would lack
    for module in LOADED:
        importlib.import_module(module)
    loaded = load()
    gc.freeze()  # no fork's collections visit what all have
    line_s = 0.02  # how long one line takes, as far as is known
    while True:
        try:
            lines, share, file, given = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _run(file, work, loaded, given)
        ended = 0
        while not ended and len(_acknowledged(Path(file))) < lines and time.monotonic() < began + AT_MOST_S:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.001)
        if lines:
            line_s = (time.monotonic() - began) / lines
        if not ended:
            time.sleep(share * line_s)
            os.kill(child, signal.SIGKILL)  # the process was not waited for, so its id is not reused
            _, status = os.waitpid(child, 0)
        pipe.send(status)


def _acknowledged(file: Path) -> list[str]:
    """Whole lines only: the last one may be on its way."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def _run(lines: str, work: Callable[..., None], loaded: Any, given: tuple[Any, ...]) -> None:
    descriptor = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        work(loaded, lambda line: os.write(descriptor, f"{line}\n".encode()), *given)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
