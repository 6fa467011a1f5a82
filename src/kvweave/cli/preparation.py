"""What follows an `add`: which process prepares the chunks, how far it is, and how it is started."""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kvweave.cli import options as opt
from kvweave.config import environment_variable
from kvweave.files import absolute_if_path

if TYPE_CHECKING:
    from pathlib import Path

    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.results import PrepareReport
    from kvweave.state.knowledge_base_state import Progress
    from kvweave.state.preparation import PreparationStatus

_LOG_BYTES: Final = 1_000_000
"""A log that is longer is begun anew by the next process."""
_LOG_EVERY_S: Final = 30.0
_LOOK_S: Final = 0.5
_NICENESS: Final = 10


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that prepares the chunks which an `add` has left.

    Attributes:
        status: what is left.
        by: the running server of the same home, a process of its own, or nobody: no process could be started.
        address: of the server.
        process: its id.
        log: what the process writes.
        why: why no process could be started.
        unprepared_s: estimated seconds until an answer begins whose chunks have no KV yet, once the model is loaded.
    """

    status: "PreparationStatus"
    by: Literal["server", "process", "nobody"]
    address: str = ""
    process: int | None = None
    log: "Path | None" = None
    why: str = ""
    unprepared_s: float | None = None

    def __str__(self) -> str:
        left = rest(self.status)
        if self.by == "server":
            return f"{left}; the server at {self.address} does it between requests, kvweave ls shows how far it is"
        if self.by == "process":
            return (
                f"{left}; process {_named(self.process)} does it, kvweave ls shows how far it is ({self.log})"
            )
        return (
            f"{left}; no process is preparing them ({self.why}); run `kvweave add --wait` on the same paths"
        )


def hand_over(options: opt.SharedOptions, base: "KnowledgeBase") -> Worker:
    """Let the background process, the running server or a new process prepare the chunks; return which."""
    unprepared_s = base.preparation.unprepared_s(base.config.retrieval.top_k)
    return replace(_handed_over(options, base), unprepared_s=unprepared_s)


def _handed_over(options: opt.SharedOptions, base: "KnowledgeBase") -> Worker:
    log, status = base.preparation.log, base.preparation.status()
    # Either looks again before it ends, and documents are marked by now; the background process does it in any way.
    if base.preparation.is_left_to_worker() or base.preparation.background() is not None:
        return Worker(status, "process", process=status.process, log=log)
    from kvweave.server.client.choice import preparing_server

    address = preparing_server(base.config, options.kb)
    if address:
        return Worker(status, "server", address)
    home = base.config.home.absolute()
    # -P: no file of the user's folder is imported in place of a module.
    command = [sys.executable, "-P", "-m", "kvweave", "idle", "--chunks-only"]
    command += ["--home", str(home), "--kb", options.kb]
    paths = replace(
        options, model=absolute_if_path(options.model), auxiliary=absolute_if_path(options.auxiliary)
    )
    names = [name for name in (*opt.MODEL, *opt.REUSE) if name != "shared"]
    command += opt.arguments_of(paths, names)
    try:
        process = start_detached(command, log, home, _environment(options))
        base.preparation.note_start(process)
        return Worker(status, "process", process=process, log=log)
    except OSError as error:
        return Worker(status, "nobody", why=f"no process could be started: {error}")


def _environment(options: opt.SharedOptions) -> dict[str, str]:
    """Return the environment for a process in another folder. The shared address may hold a password: no argument shows it."""
    environment = dict(os.environ)
    for name in map(environment_variable, ("embedding_model", "reranker")):
        if found := absolute_if_path(environment.get(name)):
            environment[name] = found
    if path := environment.get("PYTHONPATH"):
        parts = [part for part in path.split(os.pathsep) if part]  # an empty one is the user's folder
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, parts))
    if options.shared is not None:
        environment[environment_variable("shared")] = options.shared
    return environment


def start_detached(command: list[str], log: "Path", folder: "Path", environment: dict[str, str]) -> int:
    """Start a process in `folder` that outlives this one and its terminal, and writes to `log`; return its id."""
    import subprocess

    with log.open("ab") as output:
        if output.tell() > _LOG_BYTES:
            output.truncate(0)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    # On Linux a session may be a scheduling group: a process' niceness counts within it, the group's against other sessions.
    with suppress(OSError), open(f"/proc/{process.pid}/autogroup", "w") as group:
        group.write(str(_NICENESS))
    return process.pid


def prepare(options: opt.SharedOptions, *, quiet: bool) -> None:
    """Prepare what is left, also for other recipes, unless another process is at it. To a terminal with a progress bar, else as a log."""
    from kvweave.cli.output import STDERR, progress_bar

    opt.quiet_libraries()
    terminal = STDERR.is_terminal
    with options.open_kb() as base:
        if terminal:
            with progress_bar(quiet) as report:
                chunks, seconds = _prepared_all(options, base, report)
        else:
            log = _Log(base)
            log.write(f"process {os.getpid()} prepares chunks")
            chunks, seconds = _prepared_all(options, base, log)
    said = f"{chunks} chunks prepared in {seconds:.1f} s"
    if terminal:
        STDERR.print(said)
    else:
        log.write(said)


def _prepared_all(options: opt.SharedOptions, base: "KnowledgeBase", report: "Progress") -> tuple[int, float]:
    """Prepare what is left in the way of the options, and then in others; return the chunks and the seconds of it.

    Another background process does all of it, if there is one.
    """
    from kvweave.errors import KvweaveError
    from kvweave.state.preparation import settings_of

    preparation = base.preparation
    done: list[PrepareReport] = []
    began: dict[str, float] = {}  # the ways that were tried, and when the documents had last changed

    def untried() -> list[str]:
        changed_s = preparation.changed_s()
        return [way for way in preparation.marked() if began.get(way) != changed_s]

    while not done or untried():
        with preparation.in_background() as alone:
            if not alone:
                break
            began[preparation.way] = preparation.changed_s()
            done.append(_prepared(base, report))
            for way in untried():
                began[way] = preparation.changed_s()
                try:
                    with replace(options, **settings_of(way)).open_kb() as other:
                        done.append(_prepared(other, report))
                except KvweaveError as error:  # a recipe or a model that is there no more
                    print(f"not prepared for {way}: {error}", file=sys.stderr, flush=True)
        # An `add` marks its documents first and then looks whether this process is there: so look again without the lock.
    return sum(each.chunks for each in done), sum(each.seconds for each in done)


def _prepared(base: "KnowledgeBase", report: "Progress") -> "PrepareReport":
    """Prepare what is left, unless another process is at it; wait for one that prepares for another recipe."""
    preparation = base.preparation
    while preparation.since_s and preparation.worker() is not None and not preparation.is_left_to_worker():
        time.sleep(_LOOK_S)
    return base.prepare(report, wait=False)


class _Log:
    """Writes now and then how far the work is."""

    def __init__(self, base: "KnowledgeBase") -> None:
        self._base = base
        self._written_s = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() > self._written_s + _LOG_EVERY_S:
            self._written_s = time.monotonic()
            self.write(sentence(self._base.preparation.status()))

    def write(self, line: str) -> None:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)


def sentence(status: "PreparationStatus", server: str = "") -> str:
    """Say how much is left, and which process or else which server prepares it; empty if nothing is left."""
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
    return f"{rest(status)}{without}; {who}"


def _named(process: int | None) -> str:
    return f"{process or 'of an unknown id'}"


def rest(status: "PreparationStatus") -> str:
    """Say how many chunks are left and how long they take."""
    chunks = "1 chunk is" if status.left == 1 else f"{status.left} chunks are"
    return f"{chunks} still to be prepared, {'about' if status.measured else 'at least'} {duration(status.left_s)}"


def duration(seconds: float) -> str:
    """Format an estimate: 40 s, 3 min, 2.5 h."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
