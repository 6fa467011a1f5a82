"""All tiers of a store together: look-ups ask device, host, disk and the shared tier in this order; entries move between them.

The catalogue says which entries there are. A listed entry is read from the fastest tier that has it; for others the shared tier is
asked. After a retrieval an entry is promoted in the background, to each faster tier where its score beats that of the entries
that would have to go for it. An entry that is evicted from the device is still on the host or the disk. One that is evicted
from the host goes to the disk if only the shared tier has it. The disk publishes its entries to the shared tier
(`replication.py`). One scoring function decides everywhere (`eviction.py`).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvweave.errors import DamagedEntry, StoreError
from kvweave.kvstore.eviction import after_retrievals, eviction_score
from kvweave.kvstore.format import Content, ParsedEntry, check_entry, verify_content
from kvweave.kvstore.keys import EntryKey, LookUp
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.tiers.disk import DiskTier
from kvweave.kvstore.tiers.disk_check import relist
from kvweave.kvstore.tiers.fetching import FetchedEntry, Fetcher
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.kvstore.tiers.memory import DeviceTier, HostEntry, HostTier, MemoryEntry
from kvweave.kvstore.tiers.replication import ReplicatedTier
from kvweave.kvstore.tiers.tier import ListedEntry

_LOG = logging.getLogger(__name__)


LocalTier = DeviceTier | HostTier | DiskTier
"""A tier on this machine: it holds entries under a hard cap."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a look-up: the content, its key and the tier that served it; `fetched` if that was the shared tier."""

    content: Content
    key: EntryKey
    tier: TierName
    fetched: FetchedEntry | None = None


class TieredStore:
    """The tiers of one store; safe to use from several threads.

    `shared` is None if there is no shared tier; `pins` are what running requests use.

    Attributes:
        reads: runs the reading of files, and moves entries in the background.
        fetcher: reads entries from the shared tier; None if there is none.
    """

    def __init__(self, disk: DiskTier, shared: ReplicatedTier | None, pins: Pins) -> None:
        self._catalog = disk.catalog
        self._database = disk.catalog.database
        self.reads = disk.reads
        self.disk = disk
        self.host = HostTier(0, pins.in_use, self._demote)
        self.device: DeviceTier | None = None
        self.shared = shared
        # A loader of its own, so that no file waits for a server.
        self.fetcher = (
            None if shared is None else Fetcher(shared.reader, self._held_in_memory, self._store_fetched)
        )

    def memory(self, name: TierName) -> HostTier | DeviceTier | None:
        """Return a tier in memory; None if there is no such tier."""
        return self.host if name == "host" else self.device if name == "device" else None

    # Looking up

    def find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[Found | None]:
        """Return for each look-up the first candidate that can be read; keep it from being evicted while the lease lasts.

        KV from the disk is verified layer by layer as it is used, or at once if `whole`. KV from the shared tier is also read
        layer by layer while the lease lasts, or at once if `whole` or without a lease.
        """
        paths = self._catalog.paths(key.digest for each in look_ups for key in each.candidates)
        found = [self._find_listed(each, paths, whole) for each in look_ups]
        if self._can_fetch:
            self._fetch_missing(look_ups, found, None if whole else lease)
        hits = [hit for hit in found if hit is not None]
        if lease is not None:
            lease.pin(hit.key.digest for hit in hits)
        self._record_hits(hits)
        self._promote(hits)
        return found

    def prefetch(self, wanted: Iterable[Sequence[EntryKey]], lease: Lease) -> None:
        """Begin to load the first listed of each candidates; if none is listed, fetch the first from the shared tier.

        The lease cancels the loads that are not used.
        """
        wanted = list(wanted)
        paths = self._catalog.paths(key.digest for candidates in wanted for key in candidates)
        for candidates in wanted:
            listed = [key for key in candidates if key.digest in paths]
            if listed:
                self._prefetch_listed(ListedEntry(listed[0], paths[listed[0].digest]), lease)
            elif candidates and self._can_fetch and self.fetcher is not None:
                self.fetcher.prefetch(candidates[0], lease, inline=self._database.in_transaction)

    def import_missing(self, look_ups: Sequence[LookUp]) -> list[bool]:
        """Copy entries that only the shared tier has to the disk; return whether each is listed by now.

        Also lists files on the disk that lost their row with an earlier catalogue.
        """
        keys = {key.digest for each in look_ups for key in each.candidates}
        for key in keys - self._catalog.paths(keys).keys():
            relist(self.disk, key)
        found = self.find(look_ups, None)
        return [
            hit is not None and (hit.fetched is None or self._import_entry(hit.fetched.parsed))
            for hit in found
        ]

    # Setting up and closing

    def attach(self, device: DeviceTier) -> None:
        self.device = device
        self.host.page_locked = device.device.type == "cuda"

    def drop_copies(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.host.drop(keys)
        if self.device is not None:
            self.device.drop(keys)

    def clear_memory(self) -> None:
        self.host.clear()
        if self.device is not None:
            self.device.clear()

    def close(self) -> None:
        """Wait for background work, replicate what is queued, and drop everything in memory."""
        self.reads.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.shared is not None:
            self.shared.close()
        self.clear_memory()
        self.disk.files.forget()

    # Entries that the catalogue lists

    def _find_listed(self, look_up: LookUp, paths: Mapping[str, str], whole: bool) -> Found | None:
        for key in look_up.candidates:
            path = paths.get(key.digest)
            if path is None:
                continue
            entry = ListedEntry(key, path, look_up.token_ids)
            for tier in self._active_tiers():
                content = tier.get(entry)
                if content is not None and (not whole or _is_sound(content)):
                    return Found(content, key, tier.name)
        return None

    def _active_tiers(self) -> Sequence[LocalTier]:
        """Return the tiers on this machine that are not turned off, the fastest first."""
        tiers: list[LocalTier] = [self.disk]
        if self.host.limit_bytes:
            tiers.insert(0, self.host)
        if self.device is not None and self.device.limit_bytes:
            tiers.insert(0, self.device)
        return tiers

    def _prefetch_listed(self, entry: ListedEntry, lease: Lease) -> None:
        lease.pin([entry.key.digest])
        *memory, _ = self._active_tiers()
        if all(tier.get(entry) is None for tier in memory):
            cancel = self.disk.prefetch(entry)
            if cancel is not None:
                lease.on_close(cancel)

    def _record_hits(self, hits: Sequence[Found]) -> None:
        """Raise the scores of entries that were served from memory; the catalogue counts all hits later on."""
        served = [hit for hit in hits if hit.tier in ("device", "host")]
        now_s = self._catalog.now_s() if served else 0.0
        for hit in served:
            if (tier := self.memory(hit.tier)) is not None:
                tier.record_hit(hit.key.digest, hit.content.tokens, now_s)

    # Entries that only the shared tier has

    @property
    def _can_fetch(self) -> bool:
        return self.shared is not None and not self.shared.tier.is_open

    def _fetch_missing(
        self, look_ups: Sequence[LookUp], found: list[Found | None], lease: Lease | None
    ) -> None:
        """Fill in what the shared tier has: the best candidate of every look-up at once, then the next best of the rest."""
        assert self.fetcher is not None
        # A fetch may have to write, and must not wait for the transaction of the thread that waits for it.
        inline = self._database.in_transaction
        missing = {number: each.candidates for number, each in enumerate(look_ups) if found[number] is None}
        failed = set[str]()  # two provenances may have one key
        for rank in range(max(map(len, missing.values()), default=0)):
            tried = {
                number: candidates[rank]
                for number, candidates in missing.items()
                if rank < len(candidates) and candidates[rank].digest not in failed
            }
            results = self.fetcher.get(list(tried.values()), lease, inline=inline)
            for number, fetched in zip(tried, results, strict=True):
                if fetched is not None:
                    found[number] = self._accepted(look_ups[number], fetched)
                if found[number] is None:
                    failed.add(tried[number].digest)
                else:
                    del missing[number]

    def _accepted(self, look_up: LookUp, fetched: FetchedEntry) -> Found | None:
        """Return a fetched entry, unless it has other tokens or was made from a chunk that was removed here."""
        entry = fetched.parsed
        key = next(key for key in look_up.candidates if key.digest == entry.key.digest)
        try:
            check_entry(entry, key.digest, look_up.token_ids, f"entry {key.digest} of the shared tier")
        except DamagedEntry as error:
            _LOG.warning("shared entry not used: %s", error)
            return None
        return Found(entry.content, key, "shared", fetched) if self.disk.accepts(entry.sources) else None

    def _held_in_memory(self, key: str) -> FetchedEntry | None:
        """Return an entry in the host's memory that did not fit on the disk, if the shared tier still has it."""
        assert self.shared is not None
        held = self.host.peek(key)
        if held is not None and self.shared.tier.has_many([key]):
            return FetchedEntry(held.parsed)
        return None

    # Moving entries between tiers, in the background

    def _store_fetched(self, fetched: FetchedEntry) -> None:
        """Store an entry of the shared tier on the disk and in memory, where its score is high enough."""
        entry = fetched.parsed
        try:
            verify_content(entry.content)
            only_shared = not self._import_entry(entry)
            if self.disk.accepts(entry.sources):
                score = self._score(entry, entry.bytes)
                self.host.hold(entry.key.digest, HostEntry(entry, only_shared), entry.bytes, score)
            self._promote_to_device(entry)
        except StoreError as error:
            _LOG.debug("not kept: %s", error)

    def _import_entry(self, entry: ParsedEntry) -> bool:
        """Copy an entry that was verified to the disk; return whether it is listed now."""
        if self._catalog.paths([entry.key.digest]):
            return True
        return self.disk.admit(entry, self._score(entry, entry.bytes))

    def _promote(self, hits: Sequence[Found]) -> None:
        """Copy entries of this machine to faster tiers; those of the shared tier follow in `_store_fetched`."""
        to_host, to_device = self.host.limit_bytes > 0, self._has_device
        for hit in hits:
            if hit.tier == "disk" and (to_host or to_device):
                self.reads.run_later(partial(self._promote_from_disk, hit.key))
            elif hit.tier == "host" and to_device:
                self.reads.run_later(partial(self._promote_from_host, hit.key.digest))

    def _promote_from_disk(self, key: EntryKey) -> None:
        path = self._catalog.paths([key.digest]).get(key.digest)
        entry = None if path is None else self.disk.read(ListedEntry(key, path))
        if entry is None:
            return
        if self.host.limit_bytes:
            self._admit(self.host, entry, entry.bytes)
        self._promote_to_device(entry)

    def _promote_from_host(self, key: str) -> None:
        held = self.host.peek(key)
        if held is not None:
            self._promote_to_device(held.parsed)

    @property
    def _has_device(self) -> bool:
        return self.device is not None and self.device.limit_bytes > 0

    def _promote_to_device(self, entry: ParsedEntry) -> None:
        if self.device is not None and self._has_device:
            self._admit(self.device, entry, entry.content.bytes)

    def _admit(self, tier: HostTier | DeviceTier, entry: ParsedEntry, size_bytes: int) -> None:
        try:
            tier.admit(entry, self._score(entry, size_bytes))
        except StoreError as error:
            _LOG.debug("not kept in memory (%s): %s", tier.name, error)

    def _demote(self, evicted: Mapping[str, MemoryEntry[HostEntry]]) -> None:
        """Copy entries that the host evicted and only the shared tier has to the disk, if it has room for them now.

        For all others the disk had the file. If it lists one no more, it evicted it, or another process removed it.
        """
        only_shared = {key: entry for key, entry in evicted.items() if entry.held.only_shared}
        if not only_shared or self.shared is None:
            return
        listed = self._catalog.paths(only_shared)
        for key in self.shared.tier.has_many([key for key in only_shared if key not in listed]):
            self.disk.admit(only_shared[key].held.parsed, only_shared[key].score)

    def _score(self, entry: ParsedEntry, size_bytes: int) -> float:
        """Return the eviction score of an entry that was retrieved just now."""
        key, tokens, now_s = entry.key.digest, entry.content.tokens, self._catalog.now_s()
        score = self._catalog.scores([key]).get(key)
        if score is None and self.shared is not None:
            score = self.shared.rows.score(key)
        if score is None:
            return eviction_score(1, tokens, size_bytes, now_s)
        return after_retrievals(score, 1, tokens, size_bytes, now_s)


def _is_sound(content: Content) -> bool:
    """Verify all layers; a tier drops an entry whose layer is damaged before the error is raised."""
    try:
        verify_content(content)
    except DamagedEntry:
        return False
    return True
