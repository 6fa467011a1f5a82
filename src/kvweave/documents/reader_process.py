"""Reads risky files in a process of its own: if a reader crashes, hangs or takes too much memory, only that file is lost.

The process is `python -m kvweave.documents.reader_process`. It gets paths by standard input. By standard output it sends None to show
that it is alive, and each file's result. Every value is pickled and follows its length.
"""

import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Self

from kvweave.cancellation import check_cancelled
from kvweave.documents.extracted import ReadContext
from kvweave.documents.file_types import content_suffix
from kvweave.documents.readers import RISKY, ReadFile, read_file
from kvweave.errors import DocumentError, KvweaveError, MissingExtra, UnreadableDocument

STEP_LIMIT_S = 60.0
"""Longest time for one page, sheet, slide, chapter or message, and for a file that has no such parts."""

FILE_LIMIT_S = 900.0
"""Longest time for one file."""

_POLL_S: Final = 0.2
_PIECE_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct(">Q")
MEMORY_BYTES: Final = 4 * 2**30
"""Address space that the reader's process may use."""

CPU_LIMIT_S: Final = 1000
"""More than `FILE_LIMIT_S`: it ends a reader whose caller is gone."""


class FileReader:
    """Reads files; a context manager that ends the process. Not safe for several threads.

    Args:
        known_messages: ids of e-mails that are indexed themselves; see `ReadContext`.
    """

    def __init__(self, known_messages: frozenset[str] = frozenset()) -> None:
        self._known = known_messages
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path) -> ReadFile:
        """Read one file.

        Raises the errors of `read_file`, UnreadableDocument if the reader crashed or took too long, and Cancelled if the
        caller's request was cancelled meanwhile.
        """
        if content_suffix(path.name) not in RISKY:
            return read_file(path, ReadContext(known_messages=self._known))
        try:
            outcome = self._outcome(path)
        except BaseException:
            self.close()  # the process may be in the middle of the file
            raise
        if isinstance(outcome, MemoryError):
            self.close()
            raise UnreadableDocument(f"reading it needs more than {MEMORY_BYTES // 2**30} GiB of memory")
        if isinstance(outcome, KvweaveError):
            raise outcome
        assert isinstance(outcome, ReadFile)
        return outcome

    def close(self) -> None:
        """End the process. The next risky file starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _outcome(self, path: Path) -> Any:
        process = self._running()
        assert process.stdin is not None
        try:
            _send(process.stdin, str(path.absolute()))
        except BrokenPipeError:
            raise _crash(process) from None
        replies = _Replies(process)
        began = step = time.monotonic()
        while True:
            now = time.monotonic()
            if now - step > STEP_LIMIT_S or now - began > FILE_LIMIT_S:
                limit = STEP_LIMIT_S if now - step > STEP_LIMIT_S else FILE_LIMIT_S
                raise UnreadableDocument(
                    f"its reader got no further in {limit:.0f} s; split the file or save it anew"
                )
            check_cancelled()
            for reply in replies.received():
                if reply is not None:
                    return reply
                step = time.monotonic()
            if replies.ended:
                raise _crash(process)

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if none runs."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        paths = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvweave.documents.reader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # an interrupt at the terminal reaches only this process, which ends the other
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            _send(self._process.stdin, self._known)
        return self._process


def _crash(process: subprocess.Popen[bytes]) -> UnreadableDocument:
    code = process.wait()
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return UnreadableDocument(f"its reader crashed ({how})")


class _Replies:
    """The values that a process sends; see the module's docstring."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file = process.stdout.fileno()
        self._data = bytearray()
        self.ended = False

    def received(self) -> list[Any]:
        """Return the values that have arrived complete; wait for the first bytes for at most `_POLL_S`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._file, selectors.EVENT_READ)
            if selector.select(_POLL_S):
                data = os.read(self._file, _PIECE_BYTES)
                self._data += data
                self.ended = not data
        values = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            values.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return values


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


# The code that runs in the process


def _received(stream: IO[bytes]) -> Iterator[Any]:
    """Yield values until the stream ends."""
    while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
        yield pickle.loads(stream.read(_LENGTH.unpack(length)[0]))


def main() -> None:
    """Read the files whose paths come by standard input, until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library may print, which would damage the replies
    _limit_memory()
    requests = _received(sys.stdin.buffer)
    known: frozenset[str] = next(requests, frozenset())
    ctx = ReadContext(lambda: _send(replies, None), known)
    for path in requests:
        _limit_time()
        try:
            outcome: Any = read_file(Path(path), ctx)
        except (DocumentError, MissingExtra) as error:
            outcome = error
        except MemoryError:
            outcome = MemoryError()
        _send(replies, outcome)


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):  # the system may have no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time() -> None:
    """Let the system end this process if one file takes too long; its caller, which checks that too, may be gone."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        main()
