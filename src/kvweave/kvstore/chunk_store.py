"""The store of chunk KV and features on this machine's disk and in the other tiers, with its caps, statistics and checks.

Puts the components of a store together and passes the work on: the catalogue says which entries there are, the tiers hold
them. A damaged, missing or mismatched entry is a counted, logged miss: never used, never fatal.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path
from urllib.parse import urlsplit

import torch

from kvweave.database import Database
from kvweave.errors import InvalidRequest, StoreError
from kvweave.files import make_folder
from kvweave.kvstore.capacity import Capacity, check_limit
from kvweave.kvstore.catalog import Catalog, UsageCounters
from kvweave.kvstore.format import Content
from kvweave.kvstore.keys import EntryKey, LookUp, digest_tokens
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.reports import TIERS, StoreStats, TierName, TierTotals, VerifyReport
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.tiers import disk_check
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.disk import DiskTier, EntryFiles, WarnedTopics
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.kvstore.tiers.loading import Loader
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.kvstore.tiers.object_store import ObjectTier
from kvweave.kvstore.tiers.redis import SCHEMES, RedisTier
from kvweave.kvstore.tiers.replication import ReplicatedTier
from kvweave.kvstore.tiers.tier import RemoteTier
from kvweave.kvstore.tiers.tiered import TieredStore
from kvweave.types import KVProvenance, ModelFingerprint

_LOG = logging.getLogger(__name__)


def open_remote_tier(url: str, namespace: str) -> RemoteTier:
    """Return the tier at an address (see `RedisTier` and `ObjectTier`), for one namespace; sends no request yet.

    Raises:
        MissingExtra: the client for this kind of server is not installed.
        InvalidRequest: no such kind of address.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise InvalidRequest(
            f"{url!r} is no address of a shared tier; write for example redis://host:6379/0 or s3://bucket/prefix"
        )
    return RedisTier(url, namespace) if scheme in SCHEMES else ObjectTier(url, namespace)


class ChunkStore(KVStore):
    """Chunk KV and chunk features under one folder and in other tiers, each tier under a cap; a context manager.

    Several processes may use one folder, several threads one store, and several machines one shared tier. The disk's
    cap holds for the files that the catalogue lists. Each process may also be writing one more file, for which it has
    made room before.

    Args:
        folder: where the files go; created if missing.
        namespace: part of every key; entries and owners of other namespaces are never seen.
        limit_bytes: the hard cap on the files, kept from then on; None leaves the cap as it is, at first 10 % of the free
            space, at most 20 GB.
        host_bytes: the same for copies in this process's memory; at first 0, which holds none.
        shared: address of a tier that several machines share, redis://… or s3://…; None for none.
        shared_bytes: the cap there, for this namespace; at first 20 GB.
        database: where the catalogue goes, if it shares transactions with other tables; None for
            `catalog.sqlite` in the folder, closed with the store.
        owned_only: refuse entries made from a chunk that no document owns (see `own`).

    Raises:
        StoreError: the folder cannot be created or its catalogue not be read; StoreTooNew, StoreBusy.
        InvalidRequest: a negative limit, or an invalid address.
        MissingExtra: the client for the shared tier is not installed. A server that does not answer is no error.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        namespace: str = "default",
        limit_bytes: int | None = None,
        host_bytes: int | None = None,
        shared: str | None = None,
        shared_bytes: int | None = None,
        database: Database | None = None,
        owned_only: bool = False,
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.namespace = namespace
        self._location = self.folder
        self._closes_database = database is None
        self._warned = WarnedTopics(_LOG)
        caps: dict[TierName, int | None] = {"host": host_bytes, "shared": shared_bytes}
        for limit in (limit_bytes, *caps.values()):
            if limit is not None:
                check_limit(limit)
        with ExitStack() as undo:  # closes what is open if the rest cannot be opened
            server = None
            if shared is not None:
                server = CircuitBreaker(open_remote_tier(shared, namespace))
                undo.callback(server.close)
            try:
                make_folder(self.folder)
            except OSError as error:
                raise StoreError(f"{self.folder} cannot be used as a store: {error.strerror}") from error
            if database is None:
                database = Database(self.folder / "catalog.sqlite")
                undo.callback(database.close)
            self.database = database
            self._connect(server, owned_only)
            for tier, limit in caps.items():
                if limit is not None:
                    self.capacity.record_limit(tier, limit)
            self.tiers.host.set_limit(self.capacity.limit("host"))
            if not database.read_only:
                self._start(limit_bytes, relisting=not owned_only)
            undo.pop_all()

    def _connect(self, server: CircuitBreaker | None, owned_only: bool) -> None:
        self.pins = Pins()
        rows = SharedCatalog(self.database)
        self.catalog = Catalog(self.database, rows)
        self.capacity = Capacity(self.database, self.catalog, self.folder, self.pins.in_use)
        self.usage = UsageCounters(self.database, self.catalog)
        disk = DiskTier(
            self.catalog,
            EntryFiles(self.folder),
            self.capacity,
            self.usage,
            Loader(),
            owners_in=self.namespace if owned_only else None,
            on_drop=lambda keys: self.tiers.drop_copies(keys),
        )
        shared = None
        if server is not None:
            shared = ReplicatedTier(self.namespace, server, rows, disk, self.capacity, self.usage)
        self.tiers = TieredStore(disk, shared, self.pins)

    def _start(self, limit_bytes: int | None, *, relisting: bool) -> None:
        """Set the disk's cap, look after files without rows, and resume the replication queue."""
        disk, shared = self.tiers.disk, self.tiers.shared
        if limit_bytes is not None:
            disk.set_limit(limit_bytes)
        if self.catalog.is_new:
            disk_check.recover(disk, relisting=relisting)
        elif disk_check.needs_sweep(disk.files):
            disk_check.sweep(disk.files, self.catalog)
        if shared is not None and shared.queue_length:
            shared.wake()

    # Looking up and storing

    def lease(self) -> Lease:
        return Lease(self.pins)

    def _find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[tuple[EntryKey, Content] | None]:
        found = self.tiers.find(look_ups, lease, whole=whole)
        self.usage.record_hits((one.key.digest, one.tier) for one in found if one is not None)
        tried = (one for one, each in zip(found, look_ups, strict=True) if each.candidates)
        self.usage.add("misses", sum(one is None for one in tried))
        if not whole:  # for a prompt
            first = (each.candidates[0] for each in look_ups if each.candidates)
            self.usage.record_retrieved((key.namespace, key.tokens) for key in first if key.content == "kv")
        if self.usage.needs_flush:
            self.usage.try_flush()
        return [None if one is None else (one.key, one.content) for one in found]

    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        return self.catalog.paths(keys)

    def _versions(self, model: str, chunks: Sequence[str]) -> Mapping[str, list[KVProvenance]]:
        return self.catalog.versions(self.namespace, model, chunks)

    def _import(self, look_ups: Sequence[LookUp]) -> list[bool]:
        return self.tiers.import_missing(look_ups)

    def _prefetch(self, wanted: Sequence[Sequence[EntryKey]], lease: Lease) -> None:
        self.tiers.prefetch(wanted, lease)

    def _put(
        self,
        key: EntryKey,
        model_name: str,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        stored = self.tiers.disk.put(key, model_name, content, sources, max_versions)
        self._replicate()
        return stored

    def _replicate(self) -> None:
        """Process the replication queue soon, once the current transaction is committed."""
        if self.tiers.shared is not None:
            self.database.after_commit(self.tiers.shared.wake)

    # Documents

    def own(self, owner: str, chunk_digests: Iterable[str]) -> None:
        """Record that the document `owner` has these chunks, in addition to those it has already.

        In an `owned_only` store, own the chunks in the transaction that lists the document, then put their entries. If
        the document is removed in between, its KV is not stored any more. When a document changes, own the new version's
        chunks (under an owner of its own) before disowning the old version. The entries that both share then stay.
        """
        self.catalog.own(self.namespace, owner, chunk_digests)

    def disown(self, owner: str) -> int:
        """Forget a document and drop every entry made from a chunk that no document has any more.

        Entries with such a chunk in their context are dropped too. They are gone at the commit (of the surrounding
        transaction, if the database is shared). The files are deleted right after it, and published copies as
        soon as the shared tier can be reached.

        Returns:
            How many entries were dropped.
        """
        with self.database.transaction():
            dropped = self.tiers.disk.drop_files(self.catalog.disown(self.namespace, owner))
            self._replicate()
        return dropped

    # The store as a whole

    @property
    def limit_bytes(self) -> int:
        return self.capacity.limit_bytes

    @property
    def read_only(self) -> bool:
        """Whether the folder cannot be written to: entries are found, and none is stored, evicted or dropped."""
        return self.database.read_only

    @property
    def used_bytes(self) -> int:
        """Bytes of all listed files, of all namespaces; cheaper than `stats`, and writes nothing."""
        return self.catalog.total_bytes()

    @property
    def times_full(self) -> int:
        """How often this object has not stored an entry because the disk was full."""
        return self.tiers.disk.times_full

    @property
    def evicted(self) -> int:
        """How many entries this object has evicted from the disk."""
        return self.tiers.disk.evicted

    @property
    def unused_bytes(self) -> int:
        """The size of the files that no look-up has ever found: most of them are evicted first."""
        self.usage.try_flush()
        return self.catalog.unused_bytes()

    def other_models(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[str]:
        """Return the names of other models that have made KV of these chunks, given by their token ids.

        Reads no file and is not counted.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        return self.catalog.other_models(self.namespace, model.digest, digests)

    def prepared_chunks(self, model: ModelFingerprint) -> int:
        """Return how many chunks have KV of this model that was prepared, not left by a request; reads every row."""
        return self.catalog.prepared_chunks(self.namespace, model.digest)

    def retrieved_chunks(self) -> dict[str, int]:
        """Return how often the KV of each chunk was looked up for a prompt, found or not, by its token digest."""
        self.usage.try_flush()
        return self.catalog.retrieved()

    def warn_once(self, topic: str, message: Callable[[], str]) -> None:
        """Log a warning, unless the topic was warned of since the store was opened; an empty message is none."""
        self._warned.warn(topic, message)

    def set_limit(self, limit_bytes: int, tier: TierName = "disk") -> None:
        """Change a tier's cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: other programs have filled the disk to the last byte, so that the change cannot be recorded.
        """
        self.usage.try_flush()
        if tier != "disk":
            self.capacity.record_limit(tier, limit_bytes)
        if tier == "shared":
            if self.tiers.shared is not None:
                self.tiers.shared.make_room(0, float("inf"))
        elif tier == "disk":
            self.tiers.disk.set_limit(limit_bytes)
        elif (memory := self.tiers.memory(tier)) is not None:
            memory.set_limit(limit_bytes)

    def clear(self, tier: TierName = "disk") -> int:
        """Drop every entry of a tier; return how many.

        Ownership stays. Clearing the disk drops the entries of all namespaces, and everything in memory. Clearing the shared
        tier drops the entries of this namespace.
        """
        if tier == "shared":
            if self.tiers.shared is None:
                raise InvalidRequest("there is no shared tier; set `shared` to its address")
            return self.tiers.shared.clear()
        if tier == "disk":
            self.tiers.clear_memory()
            return self.tiers.disk.clear()
        memory = self.tiers.memory(tier)
        return 0 if memory is None else memory.clear()

    def stats(self) -> StoreStats:
        """Return how much is stored, and how it was used since the store was created."""
        self.usage.try_flush()
        by_kind, counts = self.catalog.totals(), self.usage.totals()
        disk = TierTotals(
            entries=sum(kind.entries for kind in by_kind.values()),
            bytes=sum(kind.bytes for kind in by_kind.values()),
            limit_bytes=self.limit_bytes,
            hits=counts["hits_disk"],
        )
        by_tier = {
            tier: disk if tier == "disk" else self._tier_totals(tier, counts[f"hits_{tier}"])
            for tier in TIERS
        }
        return StoreStats(
            entries=disk.entries,
            tokens=sum(kind.tokens for kind in by_kind.values()),
            bytes=disk.bytes,
            limit_bytes=disk.limit_bytes,
            by_kind=by_kind,
            by_tier=by_tier,
            hits=counts["hits"],
            misses=counts["misses"],
            damaged=counts["damaged"],
            evicted=counts["evicted"],
        )

    def verify(self, tier: TierName | None = None) -> VerifyReport:
        """Read every entry in full, drop damaged ones, delete files without rows, and correct the counters.

        Files younger than ten minutes are left alone: another process may be about to list them. With `tier` disk or shared,
        only that one is checked. Entries in memory were verified when they were copied there.
        """
        report = VerifyReport()
        if tier in (None, "disk"):
            report = disk_check.verify(self.tiers.disk)
        if tier in (None, "shared") and self.tiers.shared is not None:
            report = self.tiers.shared.verify(report)
        return report

    def attach_device(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """Keep copies of the most used KV on the model's device, as many as the cap allows.

        Args:
            device: for a CPU this does nothing: its memory is the host's.
            limit_bytes: the cap, kept from then on; None leaves the cap as it is, at first 0, which holds none.
        """
        if limit_bytes is not None:
            self.capacity.record_limit("device", limit_bytes)
        if device.type != "cpu":
            # Attached with a cap of 0 too: it may be raised later.
            self.tiers.attach(DeviceTier(device, self.capacity.limit("device"), self.pins.in_use))

    def forget_recent(self) -> None:
        """Drop all copies in memory and all mappings: the next look-up reads its file from the disk and verifies it.

        The kernel is asked to drop the pages of all files (not on macOS). It keeps pages that are still mapped: drop
        references to found KV first.
        """
        self.tiers.clear_memory()
        self.forget_files()

    def forget_files(self) -> None:
        """As `forget_recent`, but keep the copies in the memory tiers of host and device."""
        files = self.tiers.disk.files
        files.forget()
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for name in self.catalog.all_paths():
            with suppress(OSError), files.path(name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Write the counters, publish what is queued, and release everything but a database that was given."""
        if self.database.closed:
            return
        self.usage.try_flush()
        self.tiers.close()
        if self._closes_database:
            self.database.close()

    def _tier_totals(self, tier: TierName, hits: int) -> TierTotals:
        limit_bytes, shared, memory = self.capacity.limit(tier), self.tiers.shared, self.tiers.memory(tier)
        if tier == "shared" and shared is not None:
            total = shared.rows.total(self.namespace)
            trouble = " (refuses changes)" if shared.tier.refusing else ""
            trouble = " (does not answer)" if shared.tier.failing else trouble
            state = shared.tier.location + trouble
            return TierTotals(total.entries, total.bytes, limit_bytes, hits, shared.queue_length, state)
        if memory is None:
            return TierTotals(0, 0, limit_bytes, hits, state="none")
        return TierTotals(len(memory), memory.used_bytes, limit_bytes, hits, state="of this process")
