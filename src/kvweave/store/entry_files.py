"""Entry files and the rows that list them, kept in step: read, write, drop, sweep.

A file is written before its row is committed and deleted after its row is gone, so that no row is ever
without its file. What cannot be read is dropped, logged and counted. Knows nothing about who asks or why.
"""

import errno
import logging
from collections.abc import Sequence
from functools import partial

from kvweave.errors import DamagedEntry, EntriesInUse, StoreError, StoreFull, StoreTooNew
from kvweave.store.capacity import Capacity
from kvweave.store.catalog import Catalog, NewEntry
from kvweave.store.database import Database
from kvweave.store.disk import DiskTier
from kvweave.store.format import Content, encode_entry, verify_content
from kvweave.store.keys import EntryKey
from kvweave.store.ownership import Ownership
from kvweave.store.recent import RecentEntries
from kvweave.store.tallies import Tallies

_LOG = logging.getLogger(__name__)
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_is_full(error: Exception) -> bool:
    """Whether a write failed for want of room."""
    return isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno in _DISK_IS_FULL)


class EntryFiles:
    """The files of `tier` and their rows in `catalog`, below the cap of `capacity`.

    `owners` decides which entries are wanted, None wants all; `recent` and `tallies` are told what happens.
    """

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        tier: DiskTier,
        capacity: Capacity,
        owners: Ownership | None,
        recent: RecentEntries,
        tallies: Tallies,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._tier = tier
        self._capacity = capacity
        self._owners = owners
        self._recent = recent
        self._tallies = tallies
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
