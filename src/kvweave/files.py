"""Files that appear whole or not at all, and survive a power cut once they have appeared; and locks on files.

A file is written under a temporary name that carries the writer's process id. So the leftovers of a killed writer can be
distinguished from the file of a living one. Knows nothing about the contents.
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
    of the folder). After any error, an interrupt too, `path` has its old content; or all of the new bytes, if only
    the folder's fsync failed. The file is never deleted then, since another process may have written and counted it.

    Raises:
        OSError: the file system's own error; ENOSPC and EDQUOT when it is full.
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
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a folder of finished files to `folder`, after all of them are on the disk (fsync).

    `folder` must not exist. A reader sees all of it or nothing.
    """
    for path in temporary.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(temporary)
    temporary.rename(folder)
    sync_folder(folder.parent)


def writer_of(name: str) -> int | None:
    """Return the writer's process id if `name` is a temporary name of `write_atomically`, else None."""
    match = _TEMPORARY.search(name)
    return int(match.group(1)) if match else None


def absolute_if_path(value: str | None) -> str | None:
    """Return the absolute path of what is a path here, and anything else, such as a hub id, as it is."""
    return os.path.abspath(value) if value and os.path.exists(value) else value


def is_process_alive(process_id: int) -> bool:
    """Return whether a process with this id runs on this machine (and in this container)."""
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, created if missing; yield False at once if another process or thread holds it.

    The lock of a killed process is released.
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


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of `try_lock` on a file that may be missing; creates nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look at the same time
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a renamed file is there after a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
