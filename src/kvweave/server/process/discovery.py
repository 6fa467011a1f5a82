"""Finds the running server of a home folder: `server.json` has its address, and the lock on `server.lock` shows that it runs.

The server holds the lock as long as it lives; the operating system releases the lock of a killed process. So nobody trusts the
file of a killed server. This module imports little, so that commands start fast.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave.files import is_locked, try_lock, write_atomically

_FILE: Final = "server.json"
_LOCK: Final = "server.lock"
_TRIES: Final = 10  # a command that looks for a server holds the lock for an instant


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The address, process id and start time (seconds since 1970) of a server."""

    url: str
    pid: int
    started_s: float


@contextmanager
def sole_server(home: Path) -> Iterator[None]:
    """Hold the lock of a home's server until the context ends. Raises InvalidRequest if another server holds it."""
    home.mkdir(parents=True, exist_ok=True)
    for _ in range(_TRIES):
        with try_lock(home / _LOCK) as free:
            if free:
                (home / _FILE).unlink(missing_ok=True)  # of a server that was killed
                try:
                    yield
                finally:
                    (home / _FILE).unlink(missing_ok=True)
                return
        time.sleep(0.05)
    found = find_server(home)
    where = f" at {found.url} (process {found.pid})" if found else ""
    raise InvalidRequest(f"a server of {home} runs already{where}; stop it, or name another --home")


def record(home: Path, url: str) -> None:
    """Write the address of a home's server. The caller must be inside `sole_server`."""
    server = RunningServer(url, os.getpid(), time.time())
    write_atomically(home / _FILE, [json.dumps(asdict(server)).encode()])


def find_server(home: Path) -> RunningServer | None:
    """Return the running server of a home, or None without one or if its file cannot be read. Creates no file."""
    if not is_locked(home / _LOCK):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads((home / _FILE).read_bytes())
        return RunningServer(str(stored["url"]), int(stored["pid"]), float(stored["started_s"]))
    return None
