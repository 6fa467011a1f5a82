"""The folders that GGUF files were converted into, in the home folder, for all its knowledge bases.

    <home>/models/gguf/<digest>-v1/          a whole converted model, named by the SHA-256 of its file
    <home>/models/gguf/files/<name>.json     which digest a file has, so that it is not read again while it is unchanged

They are a cache of files that the user has. Light to import: `kvweave cache` needs neither torch nor transformers.
"""

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvweave.errors import StoreError, StoreFull
from kvweave.files import publish_folder, temporary_name, try_lock, write_atomically

VERSION: Final = 1
"""Raised when the same file would be converted into something else; older folders are then swept."""

Report = Callable[[str, int, int], None]
"""Told how far a conversion is: its stage, the units done and the units in all."""
Stamps = list[list[Any]]
"""Path, size, time of change and inode of each file of a model."""

_LOG = logging.getLogger(__name__)
_READING: Final = "reading the GGUF file (MB)"
_BLOCK_BYTES: Final = 8_000_000
_WAIT_S: Final = 0.2
_TEMPORARY: Final = ".tmp-"


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A converted model: its folder, its size, and the names of files that it was made from."""

    folder: Path
    bytes: int
    names: tuple[str, ...]


class Conversions:
    """The conversions in one home folder. Two processes may use them at once."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "models" / "gguf"

    def find(self, name: str, stamps: Stamps | None = None) -> Path | None:
        """Return the folder that a model was last converted into, or None; with `stamps`, only if its files had these then."""
        found = self._remembered(name)
        if found is None or stamps not in (None, found["parts"]):
            return None
        folder = self._place(found["digest"])
        return folder if folder.is_dir() else None

    def convert(
        self,
        name: str,
        stamps: Stamps,
        write: Callable[[Path], None],
        needed_bytes: int,
        report: Report,
    ) -> Path:
        """Return the folder of a model, made by `write` into an empty folder unless it is there.

        `stamps` are of the model's files, taken before `write` first read them. A killed process leaves a temporary folder, which
        the next conversion deletes. One process converts at a time; others wait for it.

        Raises:
            StoreFull: the disk has less room than `needed_bytes`.
            StoreError: the home folder cannot be written, or the files changed meanwhile.
        """
        with _explained(self.folder, needed_bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            digest = self._digest(name, stamps, report)
            folder = self._place(digest)
            with self._lock():
                self._sweep()
                if not folder.is_dir():
                    self._make(folder, stamps, write, needed_bytes)
            self._remember(name, stamps, digest)
        return folder

    def all(self) -> list[ConvertedModel]:
        """Return the converted models."""
        names: dict[str, list[str]] = {}
        for found in self._all_remembered():
            names.setdefault(str(found["digest"]), []).append(str(found["name"]))
        return [
            ConvertedModel(folder, _size(folder), tuple(sorted(names.get(_digest_of(folder), ()))))
            for folder in sorted(self._folders())
        ]

    def clear(self) -> tuple[list[ConvertedModel], list[ConvertedModel]]:
        """Delete the conversions whose files are still there, and leftovers; return those deleted and those left.

        A conversion without its file could not be made again, so it is left.
        """
        if not self.folder.is_dir():
            return [], []
        deleted, left = [], []
        with self._lock():
            self._sweep()
            again = {str(found["digest"]) for found in self._all_remembered() if _unchanged(found["parts"])}
            for model in self.all():
                if _digest_of(model.folder) in again:
                    self._delete(model.folder)
                    deleted.append(model)
                else:
                    left.append(model)
        return deleted, left

    def _make(self, folder: Path, stamps: Stamps, write: Callable[[Path], None], needed_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB are free")
        temporary = temporary_name(folder)
        temporary.mkdir()
        try:
            write(temporary)
            _check_unchanged(stamps)
            publish_folder(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _delete(self, folder: Path) -> None:
        """Delete a folder; after the first step no process takes what is left of it for a model."""
        gone = temporary_name(folder)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _sweep(self) -> None:
        """Delete what killed processes and older versions left. The caller holds the lock."""
        for folder in self.folder.iterdir():
            version = folder.name.rpartition("-v")[2]
            if _TEMPORARY in folder.name or (version.isdecimal() and int(version) < VERSION):
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of all conversions; wait for the process that has it. A killed process has none."""
        while True:
            with try_lock(self.folder / "convert.lock") as held:
                if held:
                    yield
                    return
            time.sleep(_WAIT_S)

    def _place(self, digest: str) -> Path:
        return self.folder / f"{digest}-v{VERSION}"

    def _folders(self) -> list[Path]:
        return [each for each in self.folder.glob(f"*-v{VERSION}") if each.is_dir()]

    # What digest a file has

    def _digest(self, name: str, stamps: Stamps, report: Report) -> str:
        """Return the digest of the files; reads them unless it was remembered while they had these stamps."""
        found = self._remembered(name)
        if found is not None and found["parts"] == stamps:
            return str(found["digest"])
        digest = _sha256([Path(stamp[0]) for stamp in stamps], report)
        _check_unchanged(stamps)
        return digest

    def _remember(self, name: str, stamps: Stamps, digest: str) -> None:
        found = {"name": name, "parts": stamps, "digest": digest}
        write_atomically(self._memory(name), [json.dumps(found, indent=2).encode()])

    def _remembered(self, name: str) -> dict[str, Any] | None:
        return _read(self._memory(name))

    def _all_remembered(self) -> list[dict[str, Any]]:
        found = (_read(path) for path in self._memory("").parent.glob("*.json"))
        return [each for each in found if each is not None]

    def _memory(self, name: str) -> Path:
        return self.folder / "files" / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """Return what is remembered of a file; None if nothing is, or it cannot be read: then the file is read again."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and {"name", "parts", "digest"} <= found.keys()
    return found if whole else None


def file_stamps(parts: Sequence[Path]) -> Stamps:
    """Return path, size, time of change and inode of each file: a file with the same ones has the same content."""
    found = [(path, path.stat()) for path in parts]
    return [[str(path), each.st_size, each.st_mtime_ns, each.st_ino] for path, each in found]


def _unchanged(stamps: Stamps) -> bool:
    with suppress(OSError, TypeError, IndexError):
        return file_stamps([Path(stamp[0]) for stamp in stamps]) == stamps
    return False


def _check_unchanged(stamps: Stamps) -> None:
    if not _unchanged(stamps):
        raise StoreError(f"{stamps[0][0]} changed while it was read; try again when it is complete")


def _sha256(parts: Sequence[Path], report: Report) -> str:
    """Return the digest of the files' bytes, one after the other: of a model in one file, that which the hub shows."""
    digest, done = hashlib.sha256(), 0
    total = sum(path.stat().st_size for path in parts)
    block = memoryview(bytearray(_BLOCK_BYTES))
    for path in parts:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                report(_READING, done // 10**6, total // 10**6)
                digest.update(block[:count])
                done += count
    report(_READING, total // 10**6, total // 10**6)
    return digest.hexdigest()


def _digest_of(folder: Path) -> str:
    return folder.name.rpartition("-v")[0]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


@contextmanager
def _explained(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of the file system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"{folder} has no room for the converted model, which needs {needed_bytes / 1e9:.1f} GB; make room, or name "
                "a --home on another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise StoreError(f"{folder} cannot be written: {error.strerror}; name another --home") from error
        raise


# Who is told how far a conversion is: it happens deep inside a call, when the model is first needed


def _ignore(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


_REPORT: ContextVar[Report] = ContextVar("_REPORT", default=_ignore)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Have what is converted inside the `with` reported to `report`."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def report_to(report: Report) -> None:
    """Have everything from now on reported to `report`, outside any `reporting`."""
    _REPORT.set(report)


def current_report() -> Report:
    """Return the callback to report to."""
    return _REPORT.get()
