"""The server of a home folder, so that other commands find it: `server.json` says where it is, a lock that it runs.

The server holds the lock on `server.lock` as long as it lives; the operating system releases the lock of a killed
process. So a file that a killed server left behind is never believed. Light to import: no command waits for it.
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
    """Where a server listens, its process, and when it was started (seconds since 1970)."""

    url: str
    pid: int
    started_s: float


@contextmanager
def sole_server(home: Path) -> Iterator[None]:
    """Be the only server of a home until the context ends; raises InvalidRequest if there is one already."""
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
    """Say where the server of a home listens; the caller is in `sole_server`."""
    server = RunningServer(url, os.getpid(), time.time())
    write_atomically(home / _FILE, [json.dumps(asdict(server)).encode()])


def find_server(home: Path) -> RunningServer | None:
    """Return the living server of a home, None if there is none or its file cannot be read. Creates nothing."""
    if not is_locked(home / _LOCK):
        return None
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads((home / _FILE).read_bytes())
        return RunningServer(str(stored["url"]), int(stored["pid"]), float(stored["started_s"]))
    return None
