"""The library that stands between a process and libc: compiled here, preloaded, and then told what to record and what to fail."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.errors import InvalidRequest
from kvweave_lab.faults.disk import Kind

_SOURCE = Path(__file__).with_name("shim.c")
_PRELOAD = "LD_PRELOAD"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_LOG": "off"}
"""No threads that a fork would lack, and no warnings of LanceDB about what the campaign does to it."""
FOREVER = 2**62


def is_loaded() -> bool:
    """Return whether this process was started with the library."""
    return hasattr(_libc(), "faults_begin")


def run_with_shim(arguments: list[str]) -> int:
    """Run Python with these arguments and the library; return its exit code. Raises InvalidRequest without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        raise InvalidRequest(
            "faults are injected by a C library, on Linux: install a C compiler (cc, gcc or clang)"
        )
    with tempfile.TemporaryDirectory(prefix="kvweave-faults-") as folder:
        library = Path(folder, "shim.so")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl", "-lpthread"], check=True
        )
        environment = {**os.environ, **_ENVIRONMENT, _PRELOAD: str(library)}
        return subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode


@contextmanager
def recording(root: Path, log: Path) -> Iterator[None]:
    """Record to `log` what this process and its forks change under `root`."""
    if _libc().faults_begin(os.fsencode(root), os.fsencode(log)):
        raise OSError(f"{log} cannot be written")
    try:
        yield
    finally:
        _libc().faults_end()


def mark(text: str) -> None:
    """Note something in the log, between the calls before and after."""
    _libc().faults_mark(text.encode())


def fail(
    kinds: Collection[Kind], first: int, last: int = FOREVER, *, error: int = 0, kill: bool = False
) -> None:
    """Let calls of these kinds fail with an error, or kill the process: those from number `first` to `last`, from 0."""
    bits = sum(1 << kind for kind in kinds)
    _libc().faults_fail(bits, ctypes.c_long(first), ctypes.c_long(last), error, int(kill))


def calls() -> int:
    """Return how many calls of the kinds of `fail` there were since."""
    return int(_libc().faults_calls())


def set_clock(seconds: float) -> None:
    """Put the clock of the day forward, as this process and its forks see it."""
    _libc().faults_clock(ctypes.c_double(seconds))


def restart_machine(identity: Path) -> None:
    """Let the machine seem to have been started again: its run has the name that is in the file `identity`."""
    _libc().faults_boot(os.fsencode(identity))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
