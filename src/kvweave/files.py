"""A file that appears whole or not at all, and survives a power cut once it has appeared.

Written under a temporary name that carries the writer's process id, so that what a killed writer leaves
behind can be told from what a living one is writing. Knows nothing about what is in the file.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]+$")


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` one after the other to `path`, creating its folder if needed.

    The bytes are on the disk before the name is, and the name before this returns (fsync of the file, then
    of the folder). On any error, an interrupt too, `path` has what it had before, or all of the new bytes if only
    the folder's fsync was left to do: it is never deleted, since another process may have written and counted it.

    Raises:
        OSError: whatever the file system says; ENOSPC and EDQUOT when it is full.
    """
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def writer_of(name: str) -> int | None:
    """The process id of the writer if `name` is a temporary name made here, else None."""
    match = _TEMPORARY.search(name)
    return int(match.group(1)) if match else None


def process_lives(process_id: int) -> bool:
    """Whether a process with this id runs on this machine (and in this container)."""
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, made if it is not there; False, at once, if another process or thread holds it.

    A killed process holds it no longer.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
