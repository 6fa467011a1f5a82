"""The disk tier: entry files in a folder, spread over 256 subfolders, and the sweeping of strays.

A file's name is its key's digest and a random part: `ab/ab12….9f3c0d21.safetensors`. No name is ever given
twice, so deleting an old file can never hit a newer one of the same key that another process just wrote.
Which files count is not known here: the catalogue's rows say so.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvweave.store.atomic_file import process_lives, writer_of
from kvweave.store.format import Content, EncodedEntry, StoredEntry, open_entry, read_entry, write_entry
from kvweave.store.keys import EntryKey

_LOG = logging.getLogger(__name__)

UNLISTED_AFTER_S = 600.0
"""A file that no row lists may be one whose row is about to be committed; after this long it is not."""

DEAD_WRITER_AFTER_S = 60.0
"""A writer in another container looks dead from here; one that has not written for this long is."""

_SUFFIX = ".safetensors"
_SWEPT = ".swept"  # its time of modification is that of the last sweep


class DiskTier:
    """Entry files under `folder`; names are relative to it, with forward slashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: EntryKey, entry: EncodedEntry) -> str:
        """Write an entry under a new name, which is returned once the file is safely on the disk.

        Raises:
            OSError: the file system's own error; nothing is left behind.
        """
        digest = key.digest
        name = f"{digest[:2]}/{digest}.{secrets.token_hex(4)}{_SUFFIX}"
        write_entry(self.folder / name, entry)
        return name

    def get(
        self,
        name: str,
        key: EntryKey,
        token_ids: Sequence[int],
        damaged: Callable[[str], object] = lambda reason: None,
    ) -> Content:
        """The entry in this file, its KV still to be verified layer by layer; see `read_entry`."""
        return read_entry(self.folder / name, key, token_ids, damaged)

    def open(self, name: str) -> StoredEntry:
        """What is in this file, whatever its key; see `open_entry`."""
        return open_entry(self.folder / name)

    def size_bytes(self, name: str) -> int:
        """The size of this file, as the file system has it."""
        return (self.folder / name).stat().st_size

    def delete(self, names: Sequence[str]) -> None:
        """Remove files whose rows are gone; mappings of them stay valid.

        A file that is gone already is no error, one that cannot be removed is logged: nothing sees it any
        more, and the next sweep tries again.
        """
        for name in names:
            _remove(self.folder / name)

    def forget(self, names: Sequence[str]) -> None:
        """Ask the kernel to drop these files' pages, so that the next read comes from the disk.

        Pages that somebody still has mapped stay, and so do those of file systems in memory.
        """
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for name in names:
            with suppress(OSError), (self.folder / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def sweep_is_due(self) -> bool:
        """Whether the last sweep is so long ago that another one may find something."""
        mark = self.folder / _SWEPT
        return not mark.exists() or _age_s(mark) > UNLISTED_AFTER_S

    def names(self) -> list[str]:
        """The names of all complete files, listed or not."""
        return [name for name, _ in self._files() if name.endswith(_SUFFIX)]

    def sweep(self, names: Sequence[str], listed: set[str]) -> int:
        """Remove strays; returns how many.

        Args:
            names: complete files, taken from `names()` *before* `listed` was read: a file whose row was
                committed in between is then seen as listed.
            listed: the files that count.
        """
        strays = [self.folder / name for name in names if name not in listed]
        doomed = [path for path in strays if _age_s(path) > UNLISTED_AFTER_S]
        doomed += [path for name, path in self._files() if _is_abandoned(name, path)]
        for path in doomed:
            _remove(path)
        with suppress(OSError):  # a full or read-only disk: the next sweep just comes earlier
            (self.folder / _SWEPT).touch()
        return len(doomed)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with os.scandir(folder) as files:
                for file in files:
                    yield f"{folder.name}/{file.name}", Path(file.path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s could not be removed: %s", path, error.strerror)


def _is_abandoned(name: str, path: Path) -> bool:
    writer = writer_of(name)
    if writer is None:
        return False
    age_s = _age_s(path)
    return age_s > UNLISTED_AFTER_S or (age_s > DEAD_WRITER_AFTER_S and not process_lives(writer))


def _age_s(path: Path) -> float:
    """Seconds since the last write; a clock that jumped back makes a file old as well, not immortal."""
    try:
        return abs(time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0
