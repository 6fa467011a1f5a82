"""The store of chunk KV, as everything else sees it: look up, put, own, limit, verify.

Brings together the catalogue (what counts), the disk tier (the files), the cap and the counters. A damaged,
missing or mismatched entry is a counted, logged miss: never used, never fatal. Knows nothing about requests
or models beyond their fingerprint.
"""

import errno
import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

from kvweave.core import ChunkKV, Making, ModelFingerprint
from kvweave.errors import DamagedEntry, StoreError, StoreFull, StoreTooNew
from kvweave.store.capacity import Capacity, check_limit
from kvweave.store.catalog import Catalog, NewEntry
from kvweave.store.database import Database
from kvweave.store.disk import DiskTier
from kvweave.store.format import encode_entry
from kvweave.store.keys import EntryKey, digest_tokens
from kvweave.store.ownership import Ownership
from kvweave.store.recent import RecentEntries
from kvweave.store.reports import StoreStats, VerifyReport
from kvweave.store.tallies import Tallies
from kvweave.store.verify import check_entries

_LOG = logging.getLogger(__name__)
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class ChunkStore:
    """Chunk KV under one folder, capped in size; a context manager.

    Several processes may use one folder, and several threads one store. The cap holds for the files that
    the catalogue lists; beside them each process may have one more file under way, for which it has made
    room beforehand.

    Args:
        folder: where the files go; made if it is not there.
        namespace: part of every key; entries and owners of other namespaces are never seen.
        limit_bytes: the hard cap, kept from then on; None leaves it as it is, at first 10 % of the free
            space, at most 20 GB.
        database: where the catalogue goes, if it shares the transactions of others; None for
            `catalog.sqlite` in the folder, closed with the store.
        owned_only: refuse entries made from a chunk that no document owns (see `own`).

    Raises:
        StoreError: the folder cannot be made or its catalogue not be read; StoreTooNew, StoreBusy.
        InvalidRequest: a negative limit.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        namespace: str = "default",
        limit_bytes: int | None = None,
        database: Database | None = None,
        owned_only: bool = False,
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.namespace = namespace
        self._owned_only = owned_only
        if limit_bytes is not None:
            check_limit(limit_bytes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be used as a store: {error.strerror}") from error
        self._database = database or Database(self.folder / "catalog.sqlite")
        self._closes_database = database is None
        self._catalog = Catalog(self._database)
        self._ownership = Ownership(self._database, self._catalog, namespace)
        self._capacity = Capacity(self._database, self._catalog, self.folder)
        self._tallies = Tallies(self._database, self._catalog)
        self._tier = DiskTier(self.folder)
        self._recent = RecentEntries()
        self._warned: set[str] = set()
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        if self._tier.sweep_is_due():
            self._sweep()

    # Looking up

    def get(self, model: ModelFingerprint, token_ids: Sequence[int], making: Making) -> ChunkKV | None:
        """One entry, or None; see `find`."""
        found = self.find(model, [(token_ids, [making])])[0]
        return None if found is None else found[0]

    def find(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], Sequence[Making]]]
    ) -> list[tuple[ChunkKV, Making] | None]:
        """Look up the KV of several spans: one query for all, then the files, mapped and verified.

        Counted as one hit or one miss for each span, whatever the number of makings; as nothing without any.

        Args:
            model: only what was made by a model with an equal digest is found.
            wanted: for each span its S token ids and the makings that will do (`kind` does not matter), best
                first. Where one is stored but damaged or gone meanwhile, the next one is taken.

        Returns:
            For each span, in order, the KV as a read-only view of the mapped file with the making that it
            matched, the very object given; or None. The views stay valid when the entry is evicted or
            removed; nobody writes to them.
        """
        spans = [(ids, self._candidates(model, ids, makings)) for ids, makings in wanted]
        paths = self._catalog.paths(key.digest for _, candidates in spans for key in candidates)
        found = [self._first_readable(paths, ids, candidates) for ids, candidates in spans]
        self._tallies.hit(key.digest for _, key in filter(None, found))
        self._tallies.add(
            "misses",
            sum(one is None for one, (_, candidates) in zip(found, spans, strict=True) if candidates),
        )
        if self._tallies.due:
            self._flush_quietly()
        return [None if one is None else (one[0], one[1].making) for one in found]

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, Making]]) -> list[bool]:
        """Whether each entry is listed, by one query; reads no file and counts as no retrieval.

        Args:
            model: the model that made it.
            wanted: for each entry the digest of its tokens (`digest_tokens`) and how it was made.
        """
        keys = [self._key(model, tokens, making).digest for tokens, making in wanted]
        paths = self._catalog.paths(keys)
        return [key in paths for key in keys]

    # Storing

    def put(self, model: ModelFingerprint, kv: ChunkKV, making: Making, sources: Sequence[str]) -> bool:
        """Store one entry, evicting the least used ones where it needs room.

        Room is made before the file is written, so that the cap holds all the time; a write that fails all
        the same has cost what stood there.

        Args:
            model: the model that made it.
            kv: shape (L, 2, G, S, D), float32, bfloat16 or float16, keys before rotation; not kept.
            making: the pass it came out of.
            sources: token digests (`digest_tokens`) of the chunks it was made from, its own and every chunk
                in its context; not the shared system prefix. Any of them losing its last owner drops it.

        Returns:
            True if the store now holds an entry of this key, an earlier one too. False, with nothing left
            behind, if it is larger than the cap or the disk is full, which is logged once; or if the store is
            `owned_only` and no document has one of the sources any more.

        Raises:
            InvalidRequest: a shape or dtype that cannot be stored.
            StoreBusy: the catalogue was locked for too long.
            OSError: the file system failed in another way.
        """
        key = self._key(model, digest_tokens(kv.token_ids), making)
        return key.digest in self._catalog.paths([key.digest]) or self._store(key, model.name, kv, sources)

    # Life of a document

    def own(self, owner: str, chunk_digests: Iterable[str]) -> None:
        """Record that the document `owner` has these chunks, beside those it has already.

        Own the chunks in the transaction that lists the document, then put their entries, in a store that is
        `owned_only`: a removal that comes in between is then never followed by KV of what was removed. When a
        document changes, own the new version's chunks (under an owner of its own) before disowning the old
        version, and what they share stays.
        """
        self._ownership.own(owner, chunk_digests)

    def disown(self, owner: str) -> int:
        """Forget a document and drop every entry made from a chunk that no document has any more.

        Entries with such a chunk in their context go too. Gone at the commit (that of the surrounding
        transaction, if the database is shared); the files are deleted right after it.

        Returns:
            How many entries were dropped.
        """
        with self._database.transaction():
            return self._discard(self._ownership.disown(owner))

    # Limits and care

    @property
    def limit_bytes(self) -> int:
        """The hard cap on the size of all files, in bytes."""
        return self._capacity.limit_bytes

    @property
    def used_bytes(self) -> int:
        """The size of all files that are listed, of all namespaces; cheaper than `stats`, and writes nothing."""
        return self._catalog.total_bytes()

    @property
    def unasked_bytes(self) -> int:
        """The size of the files that no look-up has ever found: what goes first when room is needed."""
        self._flush_quietly()
        return self._catalog.unasked_bytes()

    def set_limit(self, limit_bytes: int) -> None:
        """Change the cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: others have filled the disk to the last byte, so that the change cannot be recorded.
        """
        self._flush_quietly()
        with self._database.transaction():
            self._evict(self._capacity.set_limit(limit_bytes))

    def clear(self) -> int:
        """Drop every entry in the folder, of all namespaces; who owns which chunk stays. Returns how many."""
        with self._database.transaction():
            return self._discard(self._catalog.drop_all())

    def stats(self) -> StoreStats:
        """How much is stored, and how it was used since the store was made."""
        self._flush_quietly()
        by_kind = self._catalog.totals()
        return StoreStats(
            entries=sum(kind.entries for kind in by_kind.values()),
            tokens=sum(kind.tokens for kind in by_kind.values()),
            bytes=sum(kind.bytes for kind in by_kind.values()),
            limit_bytes=self.limit_bytes,
            by_kind=by_kind,
            **self._tallies.totals(),
        )

    def verify(self) -> VerifyReport:
        """Read every file in full, drop the damaged entries, and sweep files that no row lists.

        Files younger than ten minutes are left: another process may be about to list them.
        """
        found = check_entries(self._catalog, self._tier)
        dropped = tuple(why for name, why in found.damaged.items() if self._drop_damaged(name, why))
        return VerifyReport(
            checked=found.checked,
            damaged=dropped,
            newer=tuple(found.newer.values()),
            unopened=tuple(found.unopened.values()),
            swept_files=self._sweep(),
        )

    def forget_recent(self) -> None:
        """Let go of what was read and written: the next look-up reads its file from the disk and verifies it.

        The kernel is asked to drop the pages of all files, where it can be asked (not on macOS). It keeps
        those that are still mapped: let go of found KV first.
        """
        self._recent.clear()
        self._tier.forget(self._catalog.listed())

    def close(self) -> None:
        """Write the counters and let go of mapped files and, unless it was given, the database."""
        self._flush_quietly()
        self._recent.clear()
        if self._closes_database:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _key(self, model: ModelFingerprint, tokens: str, making: Making) -> EntryKey:
        return EntryKey(self.namespace, model.digest, tokens, making)

    def _candidates(
        self, model: ModelFingerprint, ids: Sequence[int], makings: Sequence[Making]
    ) -> list[EntryKey]:
        tokens = digest_tokens(ids) if makings else ""
        return [self._key(model, tokens, making) for making in makings]

    def _first_readable(
        self, paths: Mapping[str, str], ids: Sequence[int], candidates: Sequence[EntryKey]
    ) -> tuple[ChunkKV, EntryKey] | None:
        for key in candidates:
            path = paths.get(key.digest)
            chunk = None if path is None else self._read(path, key, ids)
            if chunk is not None:
                return chunk, key
        return None

    def _read(self, name: str, key: EntryKey, token_ids: Sequence[int]) -> ChunkKV | None:
        chunk = self._recent.get(name)
        if chunk is not None:
            return chunk
        try:
            chunk = self._tier.get(name, key, token_ids)
        except FileNotFoundError:
            # Removed by another process since the query, or lost: the row tells.
            self._drop_damaged(name, f"{self.folder / name} is missing")
        except DamagedEntry as error:
            self._drop_damaged(name, str(error))
        except (StoreTooNew, OSError) as error:
            _LOG.warning("chunk KV not used: %s", error)
        else:
            self._recent.put(name, chunk)
        return chunk

    def _store(self, key: EntryKey, model_name: str, kv: ChunkKV, sources: Sequence[str]) -> bool:
        if not self._accepts(sources):
            return False
        entry = encode_entry(key, model_name, kv, sources)
        limit_bytes = self.limit_bytes
        if entry.bytes > limit_bytes:
            self._warn_once("large", f"an entry of {entry.bytes} bytes is over the limit of {limit_bytes}")
            return False
        try:
            self._make_room(entry.bytes)
            name = self._tier.put(key, entry)
            return self._list(NewEntry(key, model_name, kv.tokens, entry.bytes, name, sources))
        except (OSError, StoreFull) as error:
            if isinstance(error, OSError) and error.errno not in _DISK_IS_FULL:
                raise
            self._warn_once("full", f"the disk is full ({error})")
            return False

    def _accepts(self, sources: Sequence[str]) -> bool:
        return not self._owned_only or self._ownership.all_owned(sources)

    def _make_room(self, needed_bytes: int) -> None:
        """Evict until the file fits under the cap, unless the disk would be too full for it even then."""
        excess = max(0, self._capacity.excess_bytes(needed_bytes))
        if not self._capacity.disk_has_room(needed_bytes - excess):
            raise OSError(errno.ENOSPC, "too little would be left for the catalogue", str(self.folder))
        if excess:
            self._flush_quietly()  # what this process used lately counts too
            with self._database.transaction():
                self._evict(self._capacity.make_room(needed_bytes))

    def _list(self, entry: NewEntry) -> bool:
        """Make a written file count; False, and the file goes again, if it is not wanted any more."""
        try:
            with self._database.transaction():
                accepted = self._accepts(entry.sources)
                if not accepted or not self._catalog.insert(entry):
                    self._discard([entry.path])  # disowned meanwhile, or another process was quicker
                self._evict(self._capacity.make_room(0, spare=entry.key.digest))
        except Exception:
            # An interrupt may come after the commit: then the file counts, and else a later sweep takes it.
            if entry.path not in self._catalog.paths([entry.key.digest]).values():
                self._tier.delete([entry.path])
            raise
        return accepted

    def _evict(self, names: Sequence[str]) -> None:
        self._tallies.add("evicted", self._discard(names))

    def _discard(self, names: Sequence[str]) -> int:
        """Forget files whose rows are dropped, and delete them after the commit; returns how many."""
        self._recent.drop(names)
        self._database.after_commit(lambda: self._tier.delete(names))
        return len(names)

    def _drop_damaged(self, name: str, reason: str) -> bool:
        """Drop a file that cannot be used; False if its row is gone already, so that nothing was wrong."""
        try:
            listed = self._catalog.drop_file(name)
        except StoreError as error:
            _LOG.warning("damaged chunk KV stays listed: %s", error)
            listed = True
        if listed:
            _LOG.warning("chunk KV dropped: %s", reason)
            self._tallies.add("damaged")
            self._discard([name])
        return listed

    def _sweep(self) -> int:
        names = self._tier.names()  # before the rows: see DiskTier.sweep
        return self._tier.sweep(names, set(self._catalog.listed()))

    def _flush_quietly(self) -> None:
        """Write the counters if that can be done now: look-ups must neither fail by it nor undo others' work.

        Not inside a transaction, whose rollback would take the counts along, and whom a full disk would end.
        """
        try:
            if not self._database.in_transaction:
                self._tallies.flush()
        except (StoreError, sqlite3.Error) as error:
            _LOG.debug("use counters not written yet: %s", error)

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            _LOG.warning("chunk KV not stored, computing instead: %s", message)
