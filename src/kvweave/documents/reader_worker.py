"""The process in which `reader_process` reads risky files: `python -m kvweave.documents.reader_worker`.

Reads requests from standard input, writes "still alive" and results to standard output, each pickled behind its length.
"""

import pickle
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

LENGTH: Final = struct.Struct(">Q")
MEMORY_BYTES: Final = 4 * 2**30
"""Address space that a reader may take; a file that unpacks to more is refused."""

CPU_LIMIT_S: Final = 1000
"""More than the process that waits for a file allows for it."""


def send(stream: IO[bytes], value: Any) -> None:
    """Write one value behind its length."""
    data = pickle.dumps(value)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def received(stream: IO[bytes]) -> Iterator[Any]:
    """Yield values until the stream ends."""
    while len(length := stream.read(LENGTH.size)) == LENGTH.size:
        yield pickle.loads(stream.read(LENGTH.unpack(length)[0]))


def main() -> None:
    """Read the files that standard input names, until it ends."""
    import os

    from kvweave.documents.extracted import ReadContext
    from kvweave.documents.readers import read_file
    from kvweave.errors import DocumentError, MissingExtra

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between
    _limit_memory()
    requests = received(sys.stdin.buffer)
    known: frozenset[str] = next(requests, frozenset())
    ctx = ReadContext(lambda: send(replies, None), known)
    for path in requests:
        _limit_time()
        try:
            outcome: Any = read_file(Path(path), ctx)
        except (DocumentError, MissingExtra) as error:
            outcome = error
        except MemoryError:
            outcome = MemoryError()
        send(replies, outcome)


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
