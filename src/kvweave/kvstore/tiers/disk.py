"""The disk tier: entry files in a folder, and their rows in the catalogue, under a hard cap.

A file's name is its key's digest and a random part, in one of 256 subfolders: `ab/ab12….9f3c0d21.safetensors`. No name is ever
used twice, so deleting an old file can never hit a newer one of the same key that another process just wrote. A file counts
once its row is committed, and is deleted after its row's deletion is.
"""

import errno
import logging
import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from kvweave.errors import DamagedEntry, EntriesInUse, StoreError, StoreFull, StoreTooNew
from kvweave.files import write_atomically
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.catalog import Catalog, NewEntry, UsageCounters
from kvweave.kvstore.format import Content, OnDamage, ParsedEntry, check_entry, encode_entry, open_entry
from kvweave.kvstore.header import as_bytes
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.tiers.loading import IsWanted, Loader
from kvweave.kvstore.tiers.tier import ListedEntry

_LOG = logging.getLogger(__name__)

SUFFIX = ".safetensors"

MAX_OPEN_ENTRIES = 1024
MAX_OPEN_BYTES = 4 * 2**30
"""Bounds of the mappings that are kept open: the kernel may drop their pages, but address space is limited."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """The entry files of `files` and their rows in `catalog`, under the cap of `capacity`. Safe to use from several threads.

    `usage` counts evicted and damaged entries. `reads` runs the reading of files. Only entries whose chunks all have an owner
    in the namespace `owners_in` are stored; None stores all. `on_drop` is called with the keys of entries that are dropped, for
    any reason.
    """

    name: TierName = "disk"

    def __init__(
        self,
        catalog: Catalog,
        files: "EntryFiles",
        capacity: Capacity,
        usage: UsageCounters,
        reads: "Loader[ParsedEntry | None]",
        owners_in: str | None,
        on_drop: Callable[[Iterable[str]], None],
    ) -> None:
        self.files = files
        self.catalog = catalog
        self._database = catalog.database
        self._capacity = capacity
        self._owners_in = owners_in
        self._usage = usage
        self.reads = reads
        self._on_drop = on_drop
        self._warned = WarnedTopics(_LOG, "chunk KV not stored, computing instead: %s")
        self.times_full = 0
        """How often an entry was not stored because the disk was full."""
        self.evicted = 0
        """How many entries were dropped to make room."""
        self._unusable: set[str] = set()  # damaged, but perhaps still listed if the disk accepts no writes

    # Reading

    def get(self, entry: ListedEntry) -> Content | None:
        """Return an entry's content, or None after dropping the entry if it is damaged or lost.

        A layer of KV is verified when it is first used. If it is damaged, the entry is dropped and DamagedEntry raised, so that
        a request that starts again does not find it.
        """
        parsed = self.read(entry)
        return None if parsed is None else parsed.content

    def read(self, entry: ListedEntry) -> ParsedEntry | None:
        parsed = self._opened(entry.path)
        if parsed is not None:
            return parsed

        def work(_: IsWanted) -> ParsedEntry | None:
            return self._open(entry)

        load = self.reads.start(entry.path, work, inline=True)
        (parsed,) = self.reads.wait([load])
        if parsed is None and load.work is not work:  # a prefetch failed, and left it to this read to say why
            parsed = self._open(entry)
        return None if entry.path in self._unusable else parsed

    def prefetch(self, entry: ListedEntry) -> Callable[[], None] | None:
        """Begin to open an entry in the background; return a function that cancels it, None if it is open already."""
        if self._opened(entry.path) is not None:
            return None
        load = self.reads.start(entry.path, lambda _: self._open_quietly(entry))
        return partial(self.reads.cancel, [load])

    def read_bytes(self, key: str) -> memoryview | None:
        """Return the bytes of a listed entry's file, mapped and not verified, or None."""
        path = self.catalog.paths([key]).get(key)
        if path is None:
            return None
        try:
            with self.files.path(path).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # removed meanwhile; an empty file cannot be mapped
            _LOG.debug("%s is not read: %s", path, error)
            return None

    def _opened(self, path: str) -> ParsedEntry | None:
        return None if path in self._unusable else self.files.recent(path)

    def _open(self, entry: ListedEntry) -> ParsedEntry | None:
        """Open an entry; return None after dropping it if it is damaged or lost."""
        path = self.files.path(entry.path)
        try:
            return self._map(entry)
        except FileNotFoundError:
            # Removed by another process since the query, or lost: the row tells.
            self.drop_damaged(entry.path, f"{path} is missing")
        except DamagedEntry as error:
            self.drop_damaged(entry.path, str(error))
        except (StoreTooNew, OSError) as error:
            _LOG.warning("stored entry not used: %s", error)
        return None

    def _open_quietly(self, entry: ListedEntry) -> ParsedEntry | None:
        """Open an entry that is not needed yet; errors are left to the read that needs it."""
        try:
            return self._map(entry)
        except (StoreError, OSError) as error:
            _LOG.debug("not prefetched: %s", error)
            return None

    def _map(self, entry: ListedEntry) -> ParsedEntry | None:
        if entry.path in self._unusable:
            return None
        parsed = self.files.open(entry.path, partial(self.drop_damaged, entry.path))
        check_entry(parsed, entry.key.digest, entry.token_ids, self.files.path(entry.path))
        self.files.remember(entry.path, parsed)
        return parsed

    # Storing

    def put(
        self,
        key: EntryKey,
        model_name: str,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        """Store an entry that is not listed yet; as `ChunkStore.put`."""
        if not self.accepts(sources):
            return False
        parts = encode_entry(key, model_name, content, sources)
        size_bytes, limit_bytes = sum(map(len, parts)), self._capacity.limit_bytes
        if size_bytes > limit_bytes:
            self._warn_once("large", f"an entry of {size_bytes} bytes is over the limit of {limit_bytes}")
            return False
        try:
            self._make_room(size_bytes)
            path = self.files.write(key.digest, parts)
            entry = NewEntry(key, model_name, content.tokens, size_bytes, path, sources)
            return self._list(entry, max_versions)
        except EntriesInUse as error:
            self._warn_once("in use", str(error))
            return False
        except (OSError, StoreFull) as error:
            if not _is_disk_full(error):
                raise
            self.times_full += 1
            self._warn_once("full", f"the disk is full ({error})")
            return False

    def admit(self, entry: ParsedEntry, score: float) -> bool:
        """Store an entry of another tier, verified before, byte for byte; return whether it is listed now."""
        try:
            if not self.accepts(entry.sources) or not self._capacity.would_admit(entry.bytes, score):
                return False
            self._make_room(entry.bytes)
            path = self.files.write(entry.key.digest, [as_bytes(entry.data)])
            return self._list(_row(entry, path, score), None)
        except (OSError, StoreError) as error:
            if _is_disk_full(error):
                self._warn_once("full", f"the disk is full ({error})")
            else:
                self._warn_once("import", f"entries of other tiers are not kept on the disk ({error})")
            return False

    def relist(self, entry: ParsedEntry, path: str) -> bool:
        """List a file that lost its row; return False if it is not accepted, or another process has listed it.

        The file stays in any case.
        """
        with self._database.transaction():
            if not self.accepts(entry.sources) or not self.catalog.insert(_row(entry, path)):
                return False
            self._evict(self._capacity.make_room(0, spare=entry.key.digest))
        return True

    def accepts(self, sources: Iterable[str]) -> bool:
        """Return whether entries made from these chunks are stored: each has an owner, or owners do not count."""
        owned = self._owners_in is None or self.catalog.all_owned(self._owners_in, sources)
        return owned and not self._database.read_only

    def _make_room(self, needed_bytes: int) -> None:
        """Evict until the file fits under the cap, unless the disk would be too full for it even then."""
        excess = max(0, self._capacity.excess_bytes(needed_bytes))
        if not self._capacity.disk_has_room(needed_bytes - excess):
            raise OSError(errno.ENOSPC, "too little would be left for the catalogue", str(self.files.folder))
        if excess:
            self._usage.try_flush()  # recent hits of this process count too
            with self._database.transaction():
                self._evict(self._capacity.make_room(needed_bytes))

    def _list(self, entry: NewEntry, max_versions: int | None) -> bool:
        """Commit the row of a written file; if the entry is not accepted any more, delete the file and return False."""
        if max_versions is not None:
            self._usage.try_flush()
        try:
            with self._database.transaction():
                accepted = self.accepts(entry.sources)
                if not accepted or not self.catalog.insert(entry):
                    self.drop_files([entry.path])  # disowned meanwhile, or another process was quicker
                elif max_versions is not None:
                    in_use = self._capacity.in_use()
                    self._evict(self.catalog.drop_surplus(entry.key, max_versions, in_use))
                self._evict(self._capacity.make_room(0, spare=entry.key.digest))
        except Exception:
            # An interrupt may come after the commit: then the file counts. If not, a later sweep deletes it.
            if entry.path not in self.catalog.paths([entry.key.digest]).values():
                self.files.delete([entry.path])
            raise
        return accepted

    def _warn_once(self, topic: str, message: str) -> None:
        self._warned.warn(topic, lambda: message)

    # Dropping

    def drop_files(self, paths: Sequence[str]) -> int:
        """Forget files whose rows are dropped, and delete them after the commit; return how many."""
        if paths:
            self._on_drop([key_of(path) for path in paths])
            self.files.forget(paths)
            self._database.after_commit(lambda: self.files.delete(paths))
        return len(paths)

    def drop_damaged(self, path: str, reason: str) -> bool:
        """Drop a file that cannot be used; return False if its row is gone already, so that nothing was wrong."""
        self._unusable.add(path)
        try:
            listed = self.catalog.drop_file(path)
        except StoreError as error:
            _LOG.warning("damaged entry stays listed: %s", error)
            listed = True
        if listed:
            _LOG.warning("stored entry dropped: %s", reason)
            self._usage.add("damaged")
            self.drop_files([path])
        return listed

    def clear(self) -> int:
        """Drop every entry; return how many. Raises StoreReadOnly."""
        return self._free(self.catalog.drop_all, self.drop_files)

    def _evict(self, paths: Sequence[str]) -> int:
        """Drop files whose rows were dropped to make room, and count them; return how many."""
        if paths:
            evicted = self.drop_files(paths)
            self.evicted += evicted
            self._usage.add("evicted", evicted)
        return len(paths)

    def _free(self, choose: Callable[[], list[str]], drop: Callable[[Sequence[str]], int]) -> int:
        """Drop the rows that `choose` drops, and their files, on a full disk too; return how many."""
        self._database.check_writable()
        chosen: list[str] = []
        try:
            with self._database.transaction():
                chosen = choose()
                return drop(chosen)
        except StoreFull:
            if not chosen:
                raise
            # The commit needs room itself. After a crash here, reading such a row finds no file and drops the row.
            self.files.delete(chosen)
            with self._database.transaction():
                return drop(choose())

    # The cap

    def set_limit(self, limit_bytes: int) -> None:
        """Change the cap for good and evict down to it; raise InvalidRequest for one that cannot be held."""
        self._free(lambda: self._capacity.set_limit(limit_bytes), self._evict)


class WarnedTopics:
    """Logs one warning for each topic; `form` is the logged text, with %s for the message."""

    def __init__(self, log: logging.Logger, form: str = "%s") -> None:
        self._log, self._form = log, form
        self._topics: set[str] = set()

    def warn(self, topic: str, message: Callable[[], str]) -> None:
        """Log what `message` returns, unless the topic was warned of before; an empty message is no warning."""
        if topic in self._topics:
            return
        if text := message():
            self._topics.add(topic)
            self._log.warning(self._form, text)


class EntryFiles:
    """Entry files under `folder`; names are relative to it, with forward slashes.

    Recently opened entries stay mapped, least recently used first out, at most `max_entries` and `max_bytes`. What is verified
    of them stays verified. Whether an entry still exists is not known here: callers ask the catalogue first.
    """

    def __init__(
        self, folder: Path, max_entries: int = MAX_OPEN_ENTRIES, max_bytes: int = MAX_OPEN_BYTES
    ) -> None:
        self.folder = folder
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._recent: OrderedDict[str, ParsedEntry] = OrderedDict()
        self._recent_bytes = 0
        self._guard = threading.Lock()

    def path(self, name: str) -> Path:
        return self.folder / name

    def scan(self) -> list[str]:
        """Return the names of all files in the subfolders: entries, listed or not, and temporary files."""
        folders = self.folder.glob("[0-9a-f][0-9a-f]")
        return [f"{folder.name}/{name}" for folder in folders for name in os.listdir(folder)]

    def write(self, key: str, parts: Iterable[bytes | memoryview]) -> str:
        """Write an entry under a new name; return the name once the file is safely on the disk.

        Raises:
            OSError: the file system's own error; nothing is left behind.
        """
        name = f"{key[:2]}/{key}.{secrets.token_hex(4)}{SUFFIX}"
        write_atomically(self.path(name), parts)
        return name

    def open(self, name: str, on_damage: OnDamage = lambda reason: None) -> ParsedEntry:
        """Map the entry in this file; see `open_entry`."""
        return open_entry(self.path(name), on_damage)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; mappings of them stay valid.

        A missing file is no error. One that cannot be deleted is logged: no row lists it, and the next sweep tries again.
        """
        for name in names:
            try:
                self.path(name).unlink(missing_ok=True)
            except OSError as error:
                _LOG.warning("%s could not be removed: %s", self.path(name), error.strerror)

    # Recently opened entries

    def recent(self, name: str) -> ParsedEntry | None:
        """Return the entry in this file if it was opened recently."""
        with self._guard:
            entry = self._recent.get(name)
            if entry is not None:
                self._recent.move_to_end(name)
            return entry

    def remember(self, name: str, entry: ParsedEntry) -> None:
        """Keep an entry that was just opened, and forget the longest unused ones beyond the bounds."""
        with self._guard:
            self._forget(name)
            self._recent[name] = entry
            self._recent_bytes += entry.bytes
            while len(self._recent) > self.max_entries or self._recent_bytes > self.max_bytes:
                self._forget(next(iter(self._recent)))

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget these opened entries, or all; tensors handed out before stay valid."""
        with self._guard:
            for name in list(self._recent) if names is None else names:
                self._forget(name)

    def _forget(self, name: str) -> None:
        entry = self._recent.pop(name, None)
        if entry is not None:
            self._recent_bytes -= entry.bytes


def key_of(path: str) -> str:
    """Return the key's digest in an entry file's name."""
    return path.rpartition("/")[2].partition(".")[0]


def _row(entry: ParsedEntry, path: str, score: float | None = None) -> NewEntry:
    return NewEntry(
        entry.key, entry.model_name, entry.content.tokens, entry.bytes, path, entry.sources, score
    )


def _is_disk_full(error: Exception) -> bool:
    return isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno in _FULL)
