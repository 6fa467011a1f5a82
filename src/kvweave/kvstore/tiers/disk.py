"""The disk tier: entry files in a folder, spread over 256 subfolders, and the sweeping of strays.

A file's name is its key's digest and a random part: `ab/ab12….9f3c0d21.safetensors`. No name is ever given
twice, so deleting an old file can never hit a newer one of the same key that another process just wrote.
Which files count is not known here: the catalogue's rows say so.
"""

import errno
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvweave.database import Database
from kvweave.errors import DamagedEntry, EntriesInUse, StoreError, StoreFull, StoreTooNew
from kvweave.files import process_lives, writer_of
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.format import (
    Content,
    EncodedEntry,
    ParsedEntry,
    encode_entry,
    open_entry,
    read_entry,
    verify_content,
    write_entry,
)
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.ownership import Ownership
from kvweave.kvstore.recent import RecentEntries
from kvweave.kvstore.tiers.tier import Blob
from kvweave.kvstore.usage import UsageCounters

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

    def open(self, name: str) -> ParsedEntry:
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


_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_is_full(error: Exception) -> bool:
    """Whether a write failed for want of room."""
    return isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno in _DISK_IS_FULL)


class EntryFiles:
    """The files of `tier` and their rows in `catalog`, below the cap of `capacity`.

    `owners` decides which entries are wanted, None wants all; `recent` and `usage` are told what happens.
    """

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        tier: DiskTier,
        capacity: Capacity,
        owners: Ownership | None,
        recent: RecentEntries,
        usage: UsageCounters,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._tier = tier
        self._capacity = capacity
        self._owners = owners
        self._recent = recent
        self._tallies = usage
        self._warned: set[str] = set()
        self._unusable: set[str] = set()  # damaged, and perhaps still listed: on a disk that takes no writes

    def read(self, name: str, key: EntryKey, token_ids: Sequence[int]) -> Content | None:
        """The content of a listed file; None, after dropping it where it is damaged or lost.

        Of KV each layer is verified when it is first asked for; damage is then raised as DamagedEntry, after dropping the
        entry, so that whoever starts anew does not find it again.
        """
        return self._read(name, key, token_ids, verify=False)

    def read_whole(self, name: str, key: EntryKey, token_ids: Sequence[int]) -> Content | None:
        """The same, with every layer verified by now."""
        return self._read(name, key, token_ids, verify=True)

    def _read(self, name: str, key: EntryKey, token_ids: Sequence[int], verify: bool) -> Content | None:
        if name in self._unusable:
            return None
        content = self._recent.get(name)
        if content is not None and not verify:
            return content
        try:
            content = content or self._tier.get(name, key, token_ids, partial(self.drop_damaged, name))
            if verify:
                verify_content(content)
        except FileNotFoundError:
            # Removed by another process since the query, or lost: the row tells.
            self.drop_damaged(name, f"{self._tier.folder / name} is missing")
        except DamagedEntry as error:
            self.drop_damaged(name, str(error))
            content = None
        except (StoreTooNew, OSError) as error:
            _LOG.warning("stored entry not used: %s", error)
        else:
            self._recent.put(name, content)
        return content

    def write(
        self, key: EntryKey, model_name: str, content: Content, sources: Sequence[str], most: int | None
    ) -> bool:
        """Store an entry that is not listed yet; as `ChunkStore.put`, `most` its versions."""
        if not self._accepts(sources):
            return False
        entry = encode_entry(key, model_name, content, sources)
        limit_bytes = self._capacity.limit_bytes
        if entry.bytes > limit_bytes:
            self._warn_once("large", f"an entry of {entry.bytes} bytes is over the limit of {limit_bytes}")
            return False
        try:
            self._make_room(entry.bytes)
            name = self._tier.put(key, entry)
            return self._list(NewEntry(key, model_name, content.tokens, entry.bytes, name, sources), most)
        except EntriesInUse as error:
            self._warn_once("in use", str(error))
            return False
        except (OSError, StoreFull) as error:
            if not disk_is_full(error):
                raise
            self._warn_once("full", f"the disk is full ({error})")
            return False

    def evict(self, names: Sequence[str]) -> None:
        """`discard` files whose rows were dropped to make room, and count them."""
        self._tallies.add("evicted", self.discard(names))

    def discard(self, names: Sequence[str]) -> int:
        """Forget files whose rows are dropped, and delete them after the commit; returns how many."""
        self._recent.drop(names)
        self._database.after_commit(lambda: self._tier.delete(names))
        return len(names)

    def drop_damaged(self, name: str, reason: str) -> bool:
        """Drop a file that cannot be used; False if its row is gone already, so that nothing was wrong."""
        self._unusable.add(name)
        try:
            listed = self._catalog.drop_file(name)
        except StoreError as error:
            _LOG.warning("damaged entry stays listed: %s", error)
            listed = True
        if listed:
            _LOG.warning("stored entry dropped: %s", reason)
            self._tallies.add("damaged")
            self.discard([name])
        return listed

    def sweep(self) -> int:
        """Remove old files that no row lists; returns how many."""
        names = self._tier.names()  # before the rows: see DiskTier.sweep
        return self._tier.sweep(names, set(self._catalog.listed()))

    def _accepts(self, sources: Sequence[str]) -> bool:
        return self._owners is None or self._owners.all_owned(sources)

    def _make_room(self, needed_bytes: int) -> None:
        """Evict until the file fits under the cap, unless the disk would be too full for it even then."""
        excess = max(0, self._capacity.excess_bytes(needed_bytes))
        if not self._capacity.disk_has_room(needed_bytes - excess):
            raise OSError(errno.ENOSPC, "too little would be left for the catalogue", str(self._tier.folder))
        if excess:
            self._tallies.flush_quietly()  # what this process used lately counts too
            with self._database.transaction():
                self.evict(self._capacity.make_room(needed_bytes))

    def _list(self, entry: NewEntry, most: int | None) -> bool:
        """Make a written file count; False, and the file goes again, if it is not wanted any more."""
        if most is not None:
            self._tallies.flush_quietly()
        try:
            with self._database.transaction():
                accepted = self._accepts(entry.sources)
                if not accepted or not self._catalog.insert(entry):
                    self.discard([entry.path])  # disowned meanwhile, or another process was quicker
                elif most is not None:
                    self.evict(self._catalog.drop_surplus(entry.key, most, self._capacity.in_use()))
                self.evict(self._capacity.make_room(0, spare=entry.key.digest))
        except Exception:
            # An interrupt may come after the commit: then the file counts, and else a later sweep takes it.
            if entry.path not in self._catalog.paths([entry.key.digest]).values():
                self._tier.delete([entry.path])
            raise
        return accepted

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            _LOG.warning("chunk KV not stored, computing instead: %s", message)


class AdoptingFiles(EntryFiles):
    """Entry files that also take in what other tiers have, where it is worth more than what has to go for it.

    `on_discard` is told the keys of entries that are dropped, whatever the reason.
    """

    on_discard: Callable[[Iterable[str]], None] = staticmethod(lambda keys: None)

    def discard(self, names: Sequence[str]) -> int:
        """As `EntryFiles.discard`."""
        self.on_discard([name.rpartition("/")[2].partition(".")[0] for name in names])
        return super().discard(names)

    def usable(self, name: str) -> bool:
        """Whether nothing was found wrong with this file so far."""
        return name not in self._unusable

    def open_ahead(self, name: str, key: EntryKey) -> Content | None:
        """As `read`, before the tokens are known: the key has their digest. The kernel begins to read the file."""
        content = self._recent.get(name)
        if content is None and self.usable(name):
            try:
                stored = open_entry(self._tier.folder / name, partial(self.drop_damaged, name))
            except (StoreError, OSError) as error:
                _LOG.debug("not read ahead: %s", error)  # whoever needs it finds out, and says so
                return None
            if stored.key.digest != key.digest:
                return None
            content = stored.content
            self._recent.put(name, content)
        return content

    def relist(self, key: str) -> bool:
        """List a file of this key that no row lists, since the catalogue that did is lost; whether there was one.

        Left alone while it is young: whoever wrote it may be about to list it. Its KV is verified when it is used.
        """
        folder = self._tier.folder
        for path in sorted((folder / key[:2]).glob(f"{key}.*.safetensors")):
            try:
                file = path.stat()
                if abs(time.time() - file.st_mtime) < DEAD_WRITER_AFTER_S:
                    continue
                stored = open_entry(path)
                name = path.relative_to(folder).as_posix()
                tokens, sources = stored.content.tokens, stored.sources
                entry = NewEntry(stored.key, stored.model_name, tokens, file.st_size, name, sources)
                if stored.key.digest == key and self._relist(entry):
                    return True
            except (StoreError, OSError) as error:
                _LOG.warning("unlisted entry not used: %s", error)
        return False

    def _relist(self, entry: NewEntry) -> bool:
        """Not as `_list` does it, which takes back the file where another process was quicker to list it."""
        with self._database.transaction():
            if not self._accepts(entry.sources) or not self._catalog.insert(entry):
                return False
            self.evict(self._capacity.make_room(0, spare=entry.key.digest))
        return True

    def relist_all(self) -> int:
        """The same of every file in the folder; returns how many are listed now."""
        keys = {name.rpartition("/")[2].partition(".")[0] for name in self._tier.names()}
        return sum(self.relist(key) for key in sorted(keys - self._catalog.sizes(keys).keys()))

    def wants(self, sources: Sequence[str]) -> bool:
        """Whether entries made from these chunks are wanted: each of them has an owner, or owners do not count."""
        return self._accepts(sources)

    def import_entries(self, stored: ParsedEntry, data: Blob, worth: float) -> bool:
        """Store an entry that was verified, byte for byte; whether it is listed now.

        Args:
            stored: what `data` holds.
            data: the bytes as another tier gave them.
            worth: its standing.
        """
        try:
            if not self._accepts(stored.sources) or not self._capacity.room_for(len(data), worth):
                return False
            self._make_room(len(data))
            name = self._tier.put(stored.key, EncodedEntry((memoryview(data),), len(data)))
            tokens = stored.content.tokens
            entry = NewEntry(stored.key, stored.model_name, tokens, len(data), name, stored.sources, worth)
            return self._list(entry, None)
        except (OSError, StoreError) as error:
            if disk_is_full(error):
                self._warn_once("full", f"the disk is full ({error})")
            else:
                self._warn_once("adopt", f"entries of other tiers are not kept on the disk ({error})")
            return False

    def mapped(self, key: str) -> memoryview | None:
        """The bytes of a listed entry's file, valid as long as they are referenced, or None; nothing is verified."""
        path = self._catalog.paths([key]).get(key)
        if path is None:
            return None
        try:
            with (self._tier.folder / path).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # removed meanwhile; an empty file cannot be mapped
            _LOG.debug("%s is not read: %s", path, error)
            return None
