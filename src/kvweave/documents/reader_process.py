"""Reads risky files in a process of its own: if a reader crashes, hangs or takes too much memory, only that file is lost.

The process is `python -m kvweave.documents.reader_process` with the number of a socket. It receives paths, and sends each file's
result; in between it sends None to show that it is alive.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

from kvweave.cancellation import check_cancelled
from kvweave.documents.extracted import ReadContext
from kvweave.documents.files import content_suffix
from kvweave.documents.readers import RISKY, ReadFile, read_file
from kvweave.errors import DocumentError, KvweaveError, MissingExtra, UnreadableDocument

STEP_LIMIT_S = 60.0
"""Longest time for one page, sheet, slide, chapter or message, and for a file that has no such parts."""

FILE_LIMIT_S = 900.0
"""Longest time for one file."""

_POLL_S: Final = 0.2
MEMORY_BYTES: Final = 4 * 2**30
"""Address space that the reader's process may use."""

CPU_LIMIT_S: Final = 1000
"""More than `FILE_LIMIT_S`: it ends a reader whose caller is gone."""


class FileReader:
    """Reads files; a context manager that ends the process. Not safe for several threads.

    Args:
        known_messages: the files of e-mails that are indexed themselves, by id; see `ReadContext`.
    """

    def __init__(self, known_messages: Mapping[str, Path] | None = None) -> None:
        self._known = dict(known_messages or {})
        self.process: subprocess.Popen[bytes] | None = None

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
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            self._connection.close()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _outcome(self, path: Path) -> Any:
        process = self._running()
        began = step = time.monotonic()
        try:
            self._connection.send(path.absolute())
            while True:
                now = time.monotonic()
                for passed, limit in ((now - step, STEP_LIMIT_S), (now - began, FILE_LIMIT_S)):
                    if passed > limit:
                        why = f"its reader got no further in {limit:.0f} s; split the file or save it anew"
                        raise UnreadableDocument(why)
                check_cancelled()
                if self._connection.poll(_POLL_S):
                    if (reply := self._connection.recv()) is not None:
                        return reply
                    step = time.monotonic()
        except (EOFError, ConnectionError):
            code = process.wait()
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise UnreadableDocument(f"its reader crashed ({how})") from None

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if none runs."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.close()
        paths = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        self._connection, other = Pipe()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvweave.documents.reader_process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # an interrupt at the terminal reaches only this process, which ends the other
            )
        with suppress(ConnectionError):
            self._connection.send(self._known)
        return self.process


# The code that runs in the process


def main() -> None:
    """Read the files whose paths come by the socket, until its other end is closed."""
    connection = Connection(int(sys.argv[1]))
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    ctx = ReadContext(lambda: connection.send(None), connection.recv())
    while True:
        path = connection.recv()
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_LIMIT_S)
        try:
            outcome: Any = read_file(path, ctx)
        except (DocumentError, MissingExtra) as error:
            outcome = error
        except MemoryError:
            outcome = MemoryError()
        connection.send(outcome)


def _limit(kind: int, amount: int) -> None:
    """Set a limit of this process, if the system allows it."""
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        main()
