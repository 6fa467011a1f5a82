"""The disk tier: the entry files of a store folder, which the catalogue lists, as a tier among others.

Every entry has its home here as long as there is room: what other tiers hold of it is a copy. Beside what a store writes
itself it takes entries in the stored format, as they come from the shared tier or out of the host's memory.
"""

import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvweave.errors import StoreError
from kvweave.store.catalog import NewEntry
from kvweave.store.disk import DEAD_WRITER_AFTER_S
from kvweave.store.entry_files import EntryFiles, disk_is_full
from kvweave.store.format import Content, EncodedEntry, StoredEntry, open_entry
from kvweave.store.keys import EntryKey
from kvweave.store.tiers.tier import Blob

_LOG = logging.getLogger(__name__)


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

    def adopt(self, stored: StoredEntry, data: Blob, worth: float) -> bool:
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
