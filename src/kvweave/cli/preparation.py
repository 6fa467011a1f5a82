"""The text that commands print about the preparation of chunks, and `kvweave idle --chunks-only`."""

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvweave.cli import options as opt

if TYPE_CHECKING:
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.server.chunk_worker import Worker
    from kvweave.state.preparation import PreparationStatus

_LOG_EVERY_S: Final = 30.0
_SAME: Final = 1.4
"""An estimate is given as one number if its most is less than so many times its least."""


def prepare(options: opt.SharedOptions, *, quiet: bool) -> None:
    """Prepare the chunks that are left. On a terminal, show a progress bar; elsewhere, write a log to standard error."""
    from kvweave.cli.output import STDERR, progress_bar
    from kvweave.server.chunk_worker import prepare_all

    terminal = STDERR.is_terminal
    with options.open_kb() as base, progress_bar(quiet or not terminal) as bar:
        log = _Log(base)
        if not terminal:
            log.write(f"process {os.getpid()} prepares chunks")
        report = bar if terminal else log
        done = prepare_all(base, lambda settings: replace(options, **settings).open_kb(), report)
    said = (
        f"{sum(each.chunks for each in done)} chunks prepared in {sum(each.seconds for each in done):.1f} s"
    )
    if terminal:
        STDERR.print(said)
    else:
        log.write(said)


class _Log:
    """Writes the progress to standard error from time to time."""

    def __init__(self, base: "KnowledgeBase") -> None:
        self._base = base
        self._written_s = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() > self._written_s + _LOG_EVERY_S:
            self._written_s = time.monotonic()
            self.write(sentence(self._base.preparation.status()))

    def write(self, line: str) -> None:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)


def worker_sentence(worker: "Worker") -> str:
    """Return a sentence with the chunks that are left and the process that prepares them."""
    left = _rest(worker.status)
    if worker.by == "server":
        return (
            f"{left}; the server at {worker.address} does it between requests, kvweave ls shows how far it is"
        )
    if worker.by == "process":
        return (
            f"{left}; process {_named(worker.process)} does it, kvweave ls shows how far it is ({worker.log})"
        )
    return f"{left}; no process is preparing them ({worker.why}); run `kvweave add --wait` on the same paths"


def sentence(status: "PreparationStatus", server: str = "") -> str:
    """Return a sentence with the chunks that are left and the process or `server` that prepares them; empty if none are left."""
    if not status.left:
        return ""
    counts = {
        "have no vector yet and are found by their words alone": status.left_without_vector,
        "have no KV yet": status.left_without_kv,
    }
    lacking = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    without = f" ({lacking})" if lacking else ""
    if status.process is not None:
        who = f"process {_named(status.process)} works on it"
    elif server:
        who = f"the server at {server} does it between requests"
    else:
        who = "no process works on it now; kvweave idle --chunks-only does (with the --recipe of the add)"
    return f"{_rest(status)}{without}; {who}"


def _named(process: int | None) -> str:
    return f"{process or 'of an unknown id'}"


def _rest(status: "PreparationStatus") -> str:
    chunks = "1 chunk is" if status.left == 1 else f"{status.left} chunks are"
    return f"{chunks} still to be prepared{_time_left(status)}"


def _time_left(status: "PreparationStatus") -> str:
    """Return ", about 3 min", ", 2 to 5 min" where speeds differ more, or nothing without an estimate."""
    least_s, most_s = status.least_left_s, status.most_left_s
    if least_s is None or most_s is None:
        return ""
    if most_s < _SAME * least_s:
        return f", about {duration((least_s + most_s) / 2)}"
    return f", {duration(least_s)} to {duration(most_s)}"


def duration(seconds: float) -> str:
    """Format an estimate: 40 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
