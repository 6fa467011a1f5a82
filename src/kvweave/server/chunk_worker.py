"""Chooses and starts the process that prepares the chunks which an `add` left, and runs its work. Imports no model library."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvweave.config import environment_variable
from kvweave.errors import KvweaveError
from kvweave.files import absolute_if_path
from kvweave.results import PrepareReport
from kvweave.server.choice import preparing_server
from kvweave.state.preparation import PreparationStatus, settings_of

if TYPE_CHECKING:
    from kvweave.knowledge_base import KnowledgeBase
    from kvweave.state.knowledge_base_state import Progress

_LOG_BYTES: Final = 1_000_000
"""The next process empties a log that is longer."""
_LOOK_S: Final = 0.5
_NICENESS: Final = 10


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that prepares the chunks which an `add` has left.

    Attributes:
        status: the chunks that are left.
        by: the running server of the same home, a process of its own, or nobody if no process could be started.
        address: URL of the server.
        process: id of the process.
        log: the file that the process writes its log to.
        why: the reason why no process could be started.
    """

    status: PreparationStatus
    by: Literal["server", "process", "nobody"]
    address: str = ""
    process: int | None = None
    log: Path | None = None
    why: str = ""


def hand_over(base: "KnowledgeBase", arguments: Sequence[str], shared: str | None) -> Worker:
    """Leave the preparation to the background process or the running server, or start a process; return the worker.

    `arguments` are command-line arguments for the new process. It gets the address of the shared tier in its environment,
    since the address may hold a password.
    """
    log, status = base.preparation.log, base.preparation.status()
    # The `add` has marked its documents, and both processes look for marks again before they end.
    if base.preparation.is_left_to_worker() or base.preparation.background() is not None:
        return Worker(status, "process", process=status.process, log=log)
    if address := preparing_server(base.config, base.name):
        return Worker(status, "server", address)
    home = base.config.home.absolute()
    # -P: Python imports no file of the user's folder in place of a module.
    command = [sys.executable, "-P", "-m", "kvweave", "idle", "--chunks-only"]
    command += ["--home", str(home), "--kb", base.name, *arguments]
    try:
        process = start_detached(command, log, home, _environment(shared))
        base.preparation.note_start(process)
        return Worker(status, "process", process=process, log=log)
    except OSError as error:
        return Worker(status, "nobody", why=f"no process could be started: {error}")


def _environment(shared: str | None) -> dict[str, str]:
    """Return this process's environment with absolute paths, for a process in another folder."""
    environment = dict(os.environ)
    for name in map(environment_variable, ("embedding_model", "reranker")):
        if found := absolute_if_path(environment.get(name)):
            environment[name] = found
    if path := environment.get("PYTHONPATH"):
        parts = [part for part in path.split(os.pathsep) if part]  # an empty part is the user's folder
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, parts))
    if shared is not None:
        environment[environment_variable("shared")] = shared
    return environment


def start_detached(command: list[str], log: Path, folder: Path, environment: dict[str, str]) -> int:
    """Start a process in `folder` that outlives this process and its terminal, and writes to `log`; return its id."""
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
    # On Linux a session may be a scheduling group. A process' niceness then counts within its group only, so set the group's too.
    with suppress(OSError), open(f"/proc/{process.pid}/autogroup", "w") as group:
        group.write(str(_NICENESS))
    return process.pid


def prepare_all(
    base: "KnowledgeBase", open_with: Callable[[dict[str, Any]], "KnowledgeBase"], report: "Progress"
) -> list[PrepareReport]:
    """Prepare the chunks that are left, first for the settings of `base`, then for the other recipes that are marked.

    `open_with` opens the same knowledge base with other settings. If another background process runs, leave everything to it.
    """
    preparation = base.preparation
    done: list[PrepareReport] = []
    began: dict[
        str, float
    ] = {}  # by key of preparation settings: when documents had last changed at the start

    def untried() -> list[str]:
        changed_s = preparation.changed_s()
        return [key for key in preparation.marked() if began.get(key) != changed_s]

    while not done or untried():
        with preparation.in_background() as alone:
            if not alone:
                break
            began[preparation.key] = preparation.changed_s()
            done.append(_prepared(base, report))
            for key in untried():
                began[key] = preparation.changed_s()
                try:
                    with open_with(settings_of(key)) as other:
                        done.append(_prepared(other, report))
                except KvweaveError as error:  # its recipe or model is gone
                    print(f"not prepared for {key}: {error}", file=sys.stderr, flush=True)
        # An `add` marks its documents before it looks for this process. So look for marks again after releasing the lock.
    return done


def _prepared(base: "KnowledgeBase", report: "Progress") -> PrepareReport:
    """Prepare the chunks that are left, after any process that prepares them for another recipe has ended."""
    preparation = base.preparation
    while preparation.since_s and preparation.worker() is not None and not preparation.is_left_to_worker():
        time.sleep(_LOOK_S)
    return base.prepare(report, wait=False)
