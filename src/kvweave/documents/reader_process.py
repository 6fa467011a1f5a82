"""Reads risky files in a process of its own: a reader that crashes, hangs or takes all memory costs one file alone."""

import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvweave.cancellation import check_cancelled
from kvweave.documents.extracted import ReadContext
from kvweave.documents.file_types import content_suffix
from kvweave.documents.reader_worker import LENGTH, MEMORY_BYTES, send
from kvweave.documents.readers import RISKY, ReadFile, read_file
from kvweave.errors import KvweaveError, UnreadableDocument

STEP_LIMIT_S = 60.0
"""Longest time for one page, sheet, slide, chapter or message, and for a file that has no such parts."""

FILE_LIMIT_S = 900.0
"""Longest time for one file."""

_POLL_S: Final = 0.2
_PIECE_BYTES: Final = 1 << 20


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
            send(process.stdin, str(path.absolute()))
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
            [sys.executable, "-m", "kvweave.documents.reader_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # an interrupt at the terminal is for this process, which ends that one
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            send(self._process.stdin, self._known)

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
        import pickle

        with selectors.DefaultSelector() as selector:
            selector.register(self._file, selectors.EVENT_READ)
            if selector.select(_POLL_S):
                data = os.read(self._file, _PIECE_BYTES)
                self._data += data
                self.ended = not data
        values = []
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            values.append(pickle.loads(bytes(self._data[LENGTH.size : end])))
            del self._data[:end]
        return values
