"""Servers in processes of their own: started, paused while others are measured, watched and ended."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from kvweave.errors import KvweaveError, MissingExtra

READY_S = 600.0
"""How long a server may take to load its model."""
STOP_S = 120.0
"""How long a server may take to finish its requests after SIGTERM."""
_POLL_S = 0.1
_SAMPLE_EVERY_S = 0.05
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ServerFailed(KvweaveError):
    """A server that was started ended or does not answer; the message has the last lines that it wrote."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of a process: all that are resident, and those that no file backs."""

    resident: int
    anonymous: int


def process_memory(pid: int) -> ProcessMemory:
    """Return the memory of a process on Linux; zeros if it has ended."""
    found = {"VmRSS:": 0, "RssAnon:": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition("\t")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return ProcessMemory(found["VmRSS:"], found["RssAnon:"])


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, however that ends. Linux only; elsewhere nothing happens."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """Return a port of the loopback device that no program uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server in a process of its own. A context manager, which kills it if it still runs.

    Args:
        name: for messages, and the name of its log in `folder`.
        command: what starts it; it must listen on `port` of 127.0.0.1.
        port: see `free_port`.
        folder: for its log.
        environment: in addition to this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.command = tuple(command)
        self.log = folder / f"{name}.log"
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id; it must have been started."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process, again after it has ended, and return when it is ready. Raises ServerFailed."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        self._wait_until_ready()
        return self

    def pause(self) -> None:
        """Suspend the process, so that it takes no time from others."""
        if self.alive:
            os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once, as a crash of the machine would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> int:
        """Ask the process to end (SIGTERM) and return its exit code. Raises ServerFailed if it does not."""
        assert self._process is not None
        self.resume()
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"{self.name} did not end within {STOP_S:.0f} s of SIGTERM{self._last_lines()}"
            ) from None

    def memory(self) -> ProcessMemory:
        """Return the memory of the process now."""
        return process_memory(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _wait_until_ready(self) -> None:
        httpx = import_httpx()
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if not self.alive:
                raise ServerFailed(f"{self.name} ended before it was ready{self._last_lines()}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            time.sleep(_POLL_S)
        raise ServerFailed(f"{self.name} was not ready after {READY_S:.0f} s{self._last_lines()}")

    def _last_lines(self) -> str:
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return f"; it wrote: {' | '.join(lines[-4:])[-600:]}" if lines else ""
        return ""


class MemoryWatch:
    """Samples the memory of a process in a thread, until the context ends. `samples` are (time.monotonic(), memory)."""

    def __init__(self, pid: int, every_s: float = _SAMPLE_EVERY_S) -> None:
        self._pid, self._every_s = pid, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, ProcessMemory]] = []

    @property
    def peak(self) -> ProcessMemory:
        """The largest value of each measure."""
        found = [memory for _, memory in self.samples]
        return ProcessMemory(
            max((one.resident for one in found), default=0), max((one.anonymous for one in found), default=0)
        )

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._done.wait(self._every_s):
            self._take()

    def _take(self) -> None:
        memory = process_memory(self._pid)
        if memory.resident:
            self.samples.append((time.monotonic(), memory))


def home_in(folder: Path, name: str) -> Path:
    """Return the home that the server `name` has in a folder."""
    return folder / f"{name}-home"


def kvweave_server(
    name: str,
    folder: Path,
    *,
    model: str | None,
    flags: Sequence[str] = (),
    home: Path | None = None,
    environment: Mapping[str, str] | None = None,
    disk_bytes_per_s: int | None = None,
) -> ServerProcess:
    """Return a `kvweave serve` that is not started yet, with a home of its own in `folder` unless one is given.

    With `disk_bytes_per_s`, its disk is simulated; see `slow_disk`.
    """
    port = free_port()
    program = ["kvweave"]
    if disk_bytes_per_s is not None:
        program = ["kvweave_lab.bench.serving.slow_disk", str(disk_bytes_per_s)]
    command = [sys.executable, "-m", *program, "serve", "--port", str(port), *flags]
    if model is not None:
        command += ["--model", model]
    home = home or home_in(folder, name)
    home.mkdir(parents=True, exist_ok=True)
    return ServerProcess(name, command, port, folder, {**(environment or {}), "KVWEAVE_HOME": str(home)})


def import_httpx() -> ModuleType:
    """Return the module httpx. Raises MissingExtra."""
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("driving a server needs httpx; pip install 'kvweave[serve]'") from error
    return httpx
