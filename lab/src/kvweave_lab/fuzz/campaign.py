"""Runs the inputs of a reader in forked processes with limits, and collects what went wrong.

An input follows from the seed, the reader's name and the input's number alone. A process takes many inputs; when one kills it
or hangs it, the next process goes on behind that input.
"""

import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NoReturn

from kvweave.errors import KvweaveError

BATCH: Final = 500
"""Inputs of one process."""

CPU_LIMIT_S: Final = 20.0
"""Processor time for one input."""

HANG_S: Final = 300.0
"""An input that takes longer, processor time or not, is given up with its process."""

MEMORY_BYTES: Final = 2 << 30
"""Address space for a process, beyond what it has when it starts."""

_STATE: Final = struct.Struct(
    "=4q2d"
)  # number, read, refused, found; the slowest and all processor time in seconds

Files = Mapping[str, bytes | Path]
"""The files of an input by name; a path is the target of a symbolic link."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader of the product.

    Attributes:
        make: draws an input.
        read: reads the input in a folder; raises what the product raises.
        refuses: the errors that count as one clear line.
        own_process: the product reads these files in a process of its own; if that aborts, the file counts as refused.
    """

    make: Callable[[Random], Files]
    read: Callable[[Path], object]
    refuses: tuple[type[BaseException], ...] = (KvweaveError,)
    own_process: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that went wrong: the input's number, the kind of fault, where it was, and the error's message."""

    number: int
    fault: str
    where: str = ""
    message: str = ""


@dataclass(slots=True)
class Count:
    """How the inputs of a reader ended."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    cpu_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)


class TooLong(BaseException):
    """An input used more processor time than it may. Not an Exception, which a reader may catch."""


def drawn(reader: Reader, name: str, seed: int, number: int) -> Files:
    """Return one input."""
    return reader.make(Random(f"{seed} {name} {number}"))


def run(
    reader: Reader, name: str, seed: int, inputs: int, count: Count, batch: int = BATCH
) -> Iterator[Count]:
    """Run the inputs from `count.inputs` to `inputs` - 1 of a reader, and yield the count after each batch."""
    with tempfile.TemporaryDirectory(prefix="kvweave-fuzz-") as place:
        while count.inputs < inputs:
            last = min(count.inputs + batch, inputs)
            _run_batch(reader, name, seed, range(count.inputs, last), Path(place), count)
            yield count


def _run_batch(reader: Reader, name: str, seed: int, numbers: range, place: Path, count: Count) -> None:
    """Run some inputs in a process of their own; `count.inputs` ends behind the last that it took."""
    shared = mmap.mmap(-1, _STATE.size)
    _STATE.pack_into(shared, 0, numbers.start, 0, 0, 0, 0.0, 0.0)
    with tempfile.TemporaryFile() as found:
        child = os.fork()
        if child == 0:
            _child(reader, name, seed, numbers, place, shared, found.fileno())
        status = _wait(child, shared)
        at, read, refused, _, slowest, cpu = _STATE.unpack_from(shared)
        found.seek(0)
        count.findings += [Finding(**json.loads(line)) for line in found.read().decode().splitlines()]
    count.read += read
    count.refused += refused
    count.slowest_s = max(count.slowest_s, slowest)
    count.cpu_s += cpu
    if at < numbers.stop:  # the process died with this input
        if reader.own_process and status == -signal.SIGABRT:  # how Rust ends when memory is short
            count.refused += 1
        else:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            count.findings.append(Finding(at, "hangs" if status == -signal.SIGKILL else f"crash ({how})"))
        at += 1
    count.inputs = at


def _wait(child: int, shared: mmap.mmap) -> int:
    """Return the exit status of a process; kill it when it gets no further."""
    before, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        at = _STATE.unpack_from(shared)[0]
        if at != before:
            before, since = at, time.monotonic()
        if time.monotonic() - since > HANG_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _child(
    reader: Reader, name: str, seed: int, numbers: range, place: Path, shared: mmap.mmap, found: int
) -> NoReturn:
    """Take the inputs; never returns."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    signal.signal(signal.SIGPROF, _out_of_time)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, hard))
    guard = _Guard(place)
    read = refused = faults = 0
    slowest = whole = 0.0
    for number in numbers:
        _STATE.pack_into(shared, 0, number, read, refused, faults, slowest, whole)
        files = drawn(reader, name, seed, number)
        began = time.process_time()
        fault = _outcome(reader, files, place, guard)
        took = time.process_time() - began
        slowest, whole = max(slowest, took), whole + took
        read += fault is None
        refused += fault is _REFUSED
        if fault is not None and fault is not _REFUSED:
            faults += 1
            line = json.dumps(
                dict(zip(("number", "fault", "where", "message"), (number, *fault), strict=True))
            )
            os.write(found, f"{line}\n".encode())
    _STATE.pack_into(shared, 0, numbers.stop, read, refused, faults, slowest, whole)
    os._exit(0)


_Fault = tuple[str, str, str]
_REFUSED: Final = ("", "", "")


def _outcome(reader: Reader, files: Files, place: Path, guard: "_Guard") -> _Fault | None:
    """Read one input; return None if it was read, `_REFUSED`, or the fault, its place in the code and its message."""
    folder = place / "input"
    write(files, folder)
    guard.opened = ""
    outcome: _Fault | None = None
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        with guard.active(folder):
            reader.read(folder)
    except reader.refuses as error:
        outcome = (
            _REFUSED if _is_one_line(error) else _described(f"{type(error).__name__} of several lines", error)
        )
    except TooLong as error:
        outcome = _described(f"takes more than {CPU_LIMIT_S:.0f} s", error)
    except BaseException as error:
        outcome = _described(type(error).__name__, error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return (f"leaves its folder: {guard.opened}", "", "") if guard.opened else outcome


def write(files: Files, folder: Path) -> None:
    """Write an input into a folder that is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(content)


def _is_one_line(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (bool(str(error).strip()) and len(str(error).splitlines()) == 1)


def _described(fault: str, error: BaseException) -> _Fault:
    """Return a fault with the innermost function of the product that an error passed, and the function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "/kvweave/" in each.filename] or frames
    places = dict.fromkeys(f"{Path(each.filename).name}:{each.name}" for each in (own[-1], frames[-1]))
    return fault, " in ".join(places), " ".join(str(error).split())[:200]


def _out_of_time(number: int, frame: Any) -> NoReturn:
    raise TooLong


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


class _Guard:
    """Notes what a reader does outside of its folder; an audit hook, since no reader may hide it."""

    def __init__(self, place: Path) -> None:
        self.opened = ""
        self._place, self._own, self._watches = str(place), "", False
        sys.addaudithook(self._hook)

    @contextmanager
    def active(self, folder: Path) -> Iterator[None]:
        """Watch while a reader works on the files of a folder; it may open any name in there."""
        self._own, self._watches = os.path.abspath(folder), True
        try:
            yield
        finally:
            self._watches = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._watches or self.opened:
            return
        if event in (
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "socket.connect",
            "pickle.find_class",
        ):
            self.opened = event
        elif event == "open" and isinstance(args[0], str):
            path, writes = (
                os.path.abspath(args[0]),
                bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)),
            )
            inside = path.startswith((self._place, "/dev/", "/proc/"))
            named = path.endswith(("/outside", "/passwd")) and not path.startswith(f"{self._own}/")
            if (writes and not inside) or named:
                self.opened = f"opens {Path(path).name}{' to write' if writes else ''}"
