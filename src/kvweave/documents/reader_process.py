"""Reads risky files in a process of its own: a reader that crashes, hangs or takes all memory costs one file alone.

That process is `python -m kvweave.documents.reader_process`. It reads requests from standard input, and writes "still alive" and
results to standard output, each pickled behind its length.
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
from types import TracebackType
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
"""Address space that a reader may take; a file that unpacks to more is refused."""

CPU_LIMIT_S: Final = 1000
"""More than the process that waits for a file allows for it."""


class FileReader:
    """Reads files; a context manager, which ends the process. For one thread.

    Args:
        known_messages: ids of the e-mails that are indexed anyway; see `ReadContext`.

    Raises Cancelled while it waits for a file whose caller has given up.
    """

    def __init__(self, known_messages: frozenset[str] = frozenset()) -> None:
        self._known = known_messages
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path) -> ReadFile:
        """Read one file; raises as `read_file`, and UnreadableDocument if its reader crashed or took too long."""
        if content_suffix(path.name) not in RISKY:
            return read_file(path, ReadContext(known_messages=self._known))
        try:
            outcome = self._outcome(path)
        except BaseException:
            self._kill()  # the process may be in the middle of the file
            raise
        if isinstance(outcome, MemoryError):
            self._kill()
            raise UnreadableDocument(f"reading it needs more than {MEMORY_BYTES // 2**30} GiB of memory")
        if isinstance(outcome, KvweaveError):
            raise outcome
        assert isinstance(outcome, ReadFile)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outcome(self, path: Path) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            _send(process.stdin, str(path.absolute()))
        except BrokenPipeError:
            raise self._died(process) from None
        began = time.monotonic()
        replies = _Replies(process)
        step = began
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
                raise self._died(process)

    def _start(self) -> None:
        self._kill()
        paths = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvweave.documents.reader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # an interrupt at the terminal is for this process, which ends that one
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            _send(self._process.stdin, self._known)

    def _died(self, process: subprocess.Popen[bytes]) -> UnreadableDocument:
        code = process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return UnreadableDocument(f"its reader crashed ({how})")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        process.wait()


class _Replies:
    """What a process writes, without waiting for it for longer than `_POLL_S`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file = process.stdout.fileno()
        self._data = bytearray()
        self.ended = False

    def received(self) -> list[Any]:
        """Return the values that have come whole; None means that the reader is alive."""
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


# What the process does


def _send(stream: IO[bytes], value: Any) -> None:
    """Write one value behind its length."""
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _received(stream: IO[bytes]) -> Iterator[Any]:
    """Yield values until the stream ends."""
    while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
        yield pickle.loads(stream.read(_LENGTH.unpack(length)[0]))


def main() -> None:
    """Read the files that standard input names, until it ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between
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
    with suppress(ImportError, ValueError, OSError):  # where the system has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time() -> None:
    """Let the system end this process if it works on and on at one file, and the process that waits for it is gone."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + CPU_LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):
        main()
