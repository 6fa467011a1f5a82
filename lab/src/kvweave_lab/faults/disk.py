"""A folder as a disk remembers it: replays recorded calls, and leaves what a kill or a power cut would leave.

Of a killed process everything stays that it had written. A power cut takes what was not synced (fsync), or some of it: a file's
bytes since its last fsync, and a folder's entries since the folder's own. That is what POSIX promises, and less than most file
systems keep.
"""

import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from random import Random

_HEAD = struct.Struct("<QqIIII")
_SECTOR_BYTES = 512
_UNSEEN = "-shm"
"""SQLite's index of its log: written through mmap, and rebuilt by the first process that opens the database."""


class Kind(IntEnum):
    """What a call does; the numbers are those of `shim.c`."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    SYNC = 4
    SYNC_FOLDER = 5
    RENAME = 6
    LINK = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10
    MARK = 11
    READ = 12
    OPEN = 13


CHANGES = frozenset(
    {Kind.CREATE, Kind.WRITE, Kind.TRUNCATE, Kind.RENAME, Kind.LINK, Kind.UNLINK, Kind.MKDIR, Kind.RMDIR}
)
SYNCS = frozenset({Kind.SYNC, Kind.SYNC_FOLDER})


class Loss(StrEnum):
    """What a crash takes: nothing (a kill), all that was not synced, or some of that."""

    NOTHING = "kill"
    UNSYNCED = "power cut, unsynced dropped"
    SOME = "power cut, unsynced half-kept"


@dataclass(frozen=True, slots=True)
class Record:
    """One call on files of the folder, or a mark, whose text is in `path`."""

    kind: Kind
    inode: int
    at: int
    path: str
    other: str
    data: bytes


def read_records(log: Path) -> list[Record]:
    """Return what the shim has recorded, in order."""
    content, records, at = log.read_bytes(), list[Record](), 0
    while at < len(content):
        inode, offset, kind, path, other, length = _HEAD.unpack_from(content, at)
        parts = []
        at += _HEAD.size
        for size in (path, other, length):
            parts.append(content[at : at + size])
            at += size
        records.append(Record(Kind(kind), inode, offset, parts[0].decode(), parts[1].decode(), parts[2]))
    return records


@dataclass(eq=False)
class File:
    """A file's bytes, those that were synced, and the changes since: a write at a place, or a new length."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def change(self, at: int, data: bytes | None) -> None:
        self.changes.append((at, data))
        _change(self.content, at, data)

    def sync(self) -> None:
        self.synced, self.changes = bytes(self.content), []

    def left(self, loss: Loss, random: Random) -> bytes:
        """Return what a crash leaves of it."""
        if loss is Loss.NOTHING or not self.changes:
            return bytes(self.content)
        left = bytearray(self.synced)
        for at, data in self.changes if loss is Loss.SOME else ():
            chance = random.random()
            if chance < 0.4:
                _change(left, at, data)
            elif chance < 0.6 and data is not None:  # torn
                _change(left, at, data[: random.randrange(0, len(data) + 1, _SECTOR_BYTES)])
        return bytes(left)


@dataclass(eq=False)
class Folder:
    """A folder's entries, and those that it had at its last sync and at each change since."""

    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    versions: "list[dict[str, File | Folder]]" = field(default_factory=lambda: [{}])

    def note(self) -> None:
        self.versions.append(dict(self.entries))

    def sync(self) -> None:
        self.versions = [dict(self.entries)]

    def left(self, loss: Loss, random: Random) -> "dict[str, File | Folder]":
        """Return the entries that a crash leaves."""
        if loss is Loss.NOTHING:
            return self.entries
        return self.versions[0] if loss is Loss.UNSYNCED else random.choice(self.versions)


class Disk:
    """The folder at `root`, all of it synced, and then changed by records."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _loaded(root)
        self._files = {path.stat().st_ino: self._file(path) for path in root.rglob("*") if path.is_file()}

    def apply(self, record: Record) -> None:
        """Change the folder as a recorded call did."""
        match record.kind:
            case Kind.CREATE:
                self._files[record.inode] = file = File()
                self._enter(record.path, file)
            case Kind.WRITE:
                self._files[record.inode].change(record.at, record.data)
            case Kind.TRUNCATE:
                self._files[record.inode].change(record.at, None)
            case Kind.SYNC:
                self._files[record.inode].sync()
            case Kind.SYNC_FOLDER:
                found = self._found(record.path)
                assert isinstance(found, Folder)
                found.sync()
            case Kind.MKDIR:
                self._enter(record.path, Folder())
            case Kind.LINK:
                self._enter(record.other, self._found(record.path))
            case Kind.RENAME:
                self._enter(record.other, self._leave(record.path))
            case Kind.UNLINK | Kind.RMDIR:
                self._leave(record.path)

    def leave(self, place: Path, loss: Loss, random: Random) -> None:
        """Write to `place`, in place of what is there, what a crash now would leave."""
        shutil.rmtree(place, ignore_errors=True)
        _write(self._top, place, loss, random)

    def differences(self, place: Path) -> list[str]:
        """Return the files that differ from those at `place`: a write was not seen."""
        ours = {name: bytes(file.content) for name, file in _walk(self._top, "")}
        theirs = {
            path.relative_to(place).as_posix(): path.read_bytes()
            for path in place.rglob("*")
            if path.is_file()
        }
        return sorted(
            name
            for name in {*ours, *theirs}
            if ours.get(name) != theirs.get(name) and not name.endswith(_UNSEEN)
        )

    def _parent(self, path: str) -> tuple[Folder, str]:
        *folders, name = Path(path).relative_to(self._root).parts
        parent = self._top
        for each in folders:
            entered = parent.entries[each]
            assert isinstance(entered, Folder)
            parent = entered
        return parent, name

    def _found(self, path: str) -> File | Folder:
        if Path(path) == self._root:
            return self._top
        parent, name = self._parent(path)
        return parent.entries[name]

    def _file(self, path: Path) -> File:
        found = self._found(str(path))
        assert isinstance(found, File)
        return found

    def _enter(self, path: str, entry: File | Folder) -> None:
        parent, name = self._parent(path)
        parent.entries[name] = entry
        parent.note()

    def _leave(self, path: str) -> File | Folder:
        parent, name = self._parent(path)
        entry = parent.entries.pop(name)
        parent.note()
        return entry


def _change(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        content.extend(bytes(at - len(content)))
    else:
        content.extend(bytes(max(0, at - len(content))))
        content[at : at + len(data)] = data


def _loaded(place: Path) -> Folder:
    folder = Folder()
    for path in place.iterdir():
        content = b"" if path.is_dir() else path.read_bytes()
        folder.entries[path.name] = _loaded(path) if path.is_dir() else File(bytearray(content), content)
    folder.sync()
    return folder


def _walk(folder: Folder, name: str) -> Iterator[tuple[str, File]]:
    for each, entry in folder.entries.items():
        if isinstance(entry, File):
            yield f"{name}{each}", entry
        else:
            yield from _walk(entry, f"{name}{each}/")


def _write(folder: Folder, place: Path, loss: Loss, random: Random) -> None:
    place.mkdir(parents=True)
    for name, entry in folder.left(loss, random).items():
        if isinstance(entry, Folder):
            _write(entry, place / name, loss, random)
        elif not name.endswith(_UNSEEN):
            (place / name).write_bytes(entry.left(loss, random))
