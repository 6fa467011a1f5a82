"""Lets the commits of a LanceDB table survive a power cut. LanceDB syncs no file, and a file system may keep a name without its bytes.

Before the catalogue relies on a version of the table, its files are written to the disk, and the file `synced` says which version is
whole there, and in which run of the machine. Once the machine has been started again, later versions are dropped before the table is
opened: they may be torn, and the catalogue relies on none of them. Nor does LanceDB report every failed write: nobody relies on a
version that names a file without its end.
"""

import errno
import json
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvweave import machine
from kvweave.files import hold_lock, sync_folder, sync_tree, write_atomically

_STATE: Final = "synced"
_LOCK: Final = "synced.lock"
_NEWEST: Final = 2**64 - 1
"""Manifests are named by the distance of their version from this number; older tables name them by the version itself."""
_ENDS: Final = {".lance": b"LANC", ".manifest": b"LANC", ".arrow": b"ARROW1"}
"""The last bytes of LanceDB's files."""
_LOG = logging.getLogger(__name__)


class Durability:
    """What of the table in `versions`, LanceDB's folder of manifests, is whole on the disk; `folder` has all of its files.

    `is_readable` says whether the newest version can be read.
    """

    def __init__(self, folder: Path, versions: Path, is_readable: Callable[[], bool]) -> None:
        self._folder, self._versions, self._is_readable = folder, versions, is_readable
        self._synced: set[tuple[str, int, int]] = set()

    def sync(self, version: int) -> None:
        """Write a version of the table to the disk, and those before it. Raises OSError, also if it is not whole."""
        torn = [path for path in map(Path, sync_tree(self._folder, self._synced)) if _is_torn(path)]
        if torn and not self._is_readable():  # otherwise no version names it that anybody uses
            self._synced.clear()
            raise OSError(errno.EIO, "a file was not written whole", str(torn[0]))
        with hold_lock(self._folder / _LOCK):
            boot, synced = self._state()
            if boot != machine.boot_id() or version > synced:  # another process may have synced a later one
                self._write(version)

    @property
    def has_begun(self) -> bool:
        """Whether something says which version is whole; nothing does of a new table, or one of an earlier version of kvweave."""
        return self._state()[0] is not None

    def begin(self, version: int) -> None:
        """Sync a table of which nothing says what is whole."""
        if not self.has_begun:
            with suppress(OSError):  # a folder that cannot be written to
                self.sync(version)

    def restore(self) -> None:
        """Drop the versions that a power cut may have torn. Does nothing in a folder that cannot be written to."""
        if self._state()[0] in (None, machine.boot_id()):
            return
        with suppress(OSError), hold_lock(self._folder / _LOCK):
            boot, synced = self._state()
            if boot != machine.boot_id():  # otherwise another process has dropped them just now
                self._drop_after(synced)
                self._write(synced)

    def go_back(self) -> None:
        """Drop the versions after the last synced one; only while nobody writes."""
        with hold_lock(self._folder / _LOCK):
            self._drop_after(self._state()[1])

    def forget(self, versions: Collection[int]) -> None:
        """Delete the manifests of versions that nobody needs, so that LanceDB deletes the files that they alone name."""
        found = self._manifests()
        for version in found.keys() & set(versions) - {self._state()[1]}:
            found[version].unlink(missing_ok=True)

    def _manifests(self) -> dict[int, Path]:
        return {_version(path): path for path in self._versions.glob("*.manifest")}

    def _drop_after(self, synced: int) -> None:
        found = self._manifests()
        later = sorted((version for version in found if version > synced), reverse=True)
        if synced not in found or not later:
            return
        for version in later:
            found[version].unlink(missing_ok=True)
        for hint in self._versions.glob("latest_version_hint*"):
            hint.unlink(missing_ok=True)
        sync_folder(self._versions)
        _LOG.warning("the index of chunks goes back to its last synced version: later ones may be torn")

    def _state(self) -> tuple[str | None, int]:
        """Return the run of the machine, and the version that was whole on the disk then; None and 0 if nothing tells."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((self._folder / _STATE).read_bytes())
            return str(found["boot"]), int(found["version"])
        return None, 0

    def _write(self, version: int) -> None:
        state = {"boot": machine.boot_id(), "version": version}
        write_atomically(self._folder / _STATE, [json.dumps(state).encode()])


def _version(manifest: Path) -> int:
    number = int(manifest.stem) if manifest.stem.isdecimal() else 0
    return _NEWEST - number if number > _NEWEST // 2 else number


def _is_torn(path: Path) -> bool:
    """Whether a file of LanceDB lacks its end."""
    end = _ENDS.get(path.suffix)
    if end is None:
        return False
    try:
        with path.open("rb") as opened:
            opened.seek(-min(len(end), path.stat().st_size), os.SEEK_END)
            return opened.read() != end
    except FileNotFoundError:  # another process has deleted it
        return False
