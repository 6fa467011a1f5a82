"""All tiers together: device, host, disk, shared, asked in this order; and the ways of an entry between them.

The catalogue says what there is. What it lists is read from the fastest tier that has it; of what it does not list, the
shared tier is asked. Upwards an entry goes after it was retrieved, in the background, wherever it is worth more than what
would have to go for it; downwards when it has to make room: out of the device's memory the host or the disk still has it,
out of the host's it goes to the disk where only the shared tier has it, and the disk has published to the shared tier
whatever it lists. One scoring function decides everywhere (`store/eviction.py`).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvweave.database import Database
from kvweave.errors import DamagedEntry, StoreError
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.eviction import after_retrievals, standing
from kvweave.kvstore.format import Content, expected, verify_content
from kvweave.kvstore.header import as_bytes
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.tiers.disk import AdoptingFiles
from kvweave.kvstore.tiers.fetching import Fetches
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.kvstore.tiers.loading import Loader, Wanted
from kvweave.kvstore.tiers.memory import DeviceTier, HostEntry, HostTier, MemoryEntry
from kvweave.kvstore.tiers.replication import Fetched, ReplicatedTier
from kvweave.types import ChunkKV

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is looked for: one of `candidates`, the best first, all of the chunk with these `token_ids`."""

    candidates: Sequence[EntryKey]
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Got:
    """What was found, under which key and where; of the shared tier also the bytes that came."""

    content: Content
    key: EntryKey
    tier: TierName
    fetched: Fetched | None = None


class Tiered:
    """The tiers of one store; safe to use from several threads.

    Args:
        database: of the catalogue.
        catalog: what there is.
        files: the disk, for reading and adopting.
        host: the host's memory; with a cap of 0 it holds nothing.
        shared: None where there is none.
        pins: what running requests use.
    """

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        files: AdoptingFiles,
        host: HostTier,
        shared: ReplicatedTier | None,
        pins: Pins,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._files = files
        self._pins = pins
        self.host = host
        self.shared = shared
        self.device: DeviceTier | None = None
        # Apart, so that no file waits behind a server.
        self._reads: Loader[Content | None] = Loader()
        self._fetches = None if shared is None else Fetches(shared, self._only_in_memory, self._settle)

    # Looking up

    def find(self, asked: Sequence[Asked], lease: Lease | None, *, whole: bool = False) -> list[Got | None]:
        """For each, in order, the first candidate that can be read; they stay pinned for as long as the lease lasts.

        KV read from the disk is verified layer by layer when it is asked for, or by now if `whole`. KV of the shared tier comes
        layer by layer too, for as long as the lease lasts, or it is there by now if `whole` or without a lease.
        """
        paths = self._catalog.paths(key.digest for each in asked for key in each.candidates)
        found = [self._listed(each, paths, whole) for each in asked]
        self._fetch_missing(asked, found, None if whole else lease)
        got = [one for one in found if one is not None]
        if lease is not None:
            lease.pin(one.key.digest for one in got)
        self._count_in_memory(got)
        self._promote(got)
        return found

    def prefetch(self, wanted: Iterable[Sequence[EntryKey]], lease: Lease) -> None:
        """Begin to load, of each of these, the first candidate that is listed; of those without any, the best from others.

        The lease cancels what is not used.
        """
        wanted = list(wanted)
        paths = self._catalog.paths(key.digest for candidates in wanted for key in candidates)
        for candidates in wanted:
            listed = [key for key in candidates if key.digest in paths]
            if listed:
                self._read_ahead(listed[0], paths[listed[0].digest], lease)
            elif candidates and self._fetches is not None and self._fetches.answers:
                self._fetches.ahead(candidates[0], lease, here=self._database.in_transaction)

    def lease(self) -> Lease:
        """For one request."""
        return Lease(self._pins)

    def adopt_missing(self, asked: Sequence[Asked]) -> list[bool]:
        """Bring what only the shared tier has to the disk; whether each of these is listed by now.

        So is what lies on the disk and is not listed, since an earlier catalogue was lost.
        """
        keys = {key.digest for each in asked for key in each.candidates}
        for key in keys - self._catalog.paths(keys).keys():
            self._files.relist(key)
        found = self.find(asked, None)
        return [one is not None and (one.fetched is None or self._adopt(one.fetched)) for one in found]

    # Life

    def attach(self, device: DeviceTier) -> None:
        """Use a device's memory from now on."""
        self.device = device
        self.host.page_locked = device.device.type == "cuda"

    def limit_host(self, limit_bytes: int) -> None:
        """Change the cap of the host's memory; what has to go goes where it is still worth keeping."""
        self._demote(self.host.residents.set_limit(limit_bytes))

    def forget(self, keys: Iterable[str]) -> None:
        """These entries are dropped: let go of copies in memory."""
        keys = list(keys)
        self.host.residents.drop(keys)
        if self.device is not None:
            self.device.residents.drop(keys)

    def forget_copies(self) -> None:
        """Let go of everything in memory."""
        self.host.residents.drop(self.host.residents.sizes())
        if self.device is not None:
            self.device.residents.drop(self.device.residents.sizes())

    def close(self) -> None:
        """Wait for what is under way, and let go of memory."""
        self._reads.close()
        if self._fetches is not None:
            self._fetches.close()
        self.forget_copies()

    # Inside: what the catalogue lists

    def _listed(self, each: Asked, paths: Mapping[str, str], whole: bool) -> Got | None:
        for key in each.candidates:
            path = paths.get(key.digest)
            if path is None:
                continue
            got = self._resident(key)
            if got is not None:
                return got
            content = self._read(path, key, each.token_ids, whole)
            if content is not None:
                return Got(content, key, "disk")
        return None

    def _resident(self, key: EntryKey) -> Got | None:
        if self.device is not None and (kv := self.device.content(key.digest)) is not None:
            return Got(kv, key, "device")
        if (content := self.host.content(key.digest)) is not None:
            return Got(content, key, "host")
        return None

    def _count_in_memory(self, got: Sequence[Got]) -> None:
        served = [one for one in got if one.tier in ("device", "host")]
        now = self._catalog.now_s() if served else 0.0
        for one in served:
            if one.tier == "host":
                self.host.residents.asked(one.key.digest, one.content.tokens, now)
            elif self.device is not None:
                self.device.residents.asked(one.key.digest, one.content.tokens, now)

    def _read(self, path: str, key: EntryKey, token_ids: Sequence[int], whole: bool) -> Content | None:
        if whole:
            return self._files.read_whole(path, key, token_ids)

        def read(_: Wanted) -> Content | None:
            return self._files.read(path, key, token_ids)

        load = self._reads.start(("disk", path), read, here=True)
        (content,) = self._reads.wait([load])
        if content is None and load.work is not read:
            # Reading ahead found something wrong, and left it to be told here.
            return self._files.read(path, key, token_ids)
        return content if self._files.usable(path) else None

    def _read_ahead(self, key: EntryKey, path: str, lease: Lease) -> None:
        lease.pin([key.digest])
        if self._resident(key) is None:
            load = self._reads.start(("disk", path), lambda _: self._files.open_ahead(path, key))
            lease.on_close(partial(self._reads.cancel, [load]))

    # Inside: what only others have

    def _fetch_missing(self, asked: Sequence[Asked], found: list[Got | None], lease: Lease | None) -> None:
        """Fill in what the shared tier has: the best candidate of every span at once, then the next best of the rest."""
        if self._fetches is None or not self._fetches.answers:
            return
        # A fetch may have to write, and must not wait for the transaction of the thread that waits for it.
        here = self._database.in_transaction
        missing = {number: each.candidates for number, each in enumerate(asked) if found[number] is None}
        in_vain = set[str]()  # two makings may have one key
        for rank in range(max(map(len, missing.values()), default=0)):
            tried = {
                number: candidates[rank]
                for number, candidates in missing.items()
                if rank < len(candidates) and candidates[rank].digest not in in_vain
            }
            got = self._fetches.get(list(tried.values()), lease, here=here)
            for number, fetched in zip(tried, got, strict=True):
                if fetched is not None:
                    found[number] = self._accepted(asked[number], fetched)
                if found[number] is None:
                    in_vain.add(tried[number].digest)
                else:
                    del missing[number]

    def _only_in_memory(self, key: str) -> Fetched | None:
        """What did not fit on the disk and is in the host's memory, if it still counts."""
        assert self.shared is not None
        held = self.host.residents.get(key)
        if held is not None and self.shared.tier.has_many([key]):
            return Fetched(held.stored, held.data)
        return None

    def _accepted(self, asked: Asked, fetched: Fetched) -> Got | None:
        """What was fetched, if it is the chunk that was asked for and made of nothing that was removed here."""
        stored = fetched.stored
        key = next(key for key in asked.candidates if key.digest == stored.key.digest)
        try:
            content = expected(stored, key, asked.token_ids, f"entry {key.digest} of the shared tier")
        except DamagedEntry as error:
            _LOG.warning("shared entry not used: %s", error)
            return None
        return Got(content, key, "shared", fetched) if self._files.wants(stored.sources) else None

    # Inside: the ways between tiers, in the background

    def _settle(self, fetched: Fetched) -> None:
        """Keep what came from the shared tier on the disk and in memory, where it is worth it."""
        stored, size = fetched.stored, fetched.data.numel()
        key = stored.key.digest
        try:
            verify_content(stored.content)
            entry = HostEntry(fetched.data, stored, only_shared=not self._adopt(fetched))
            if self._files.wants(stored.sources):
                worth = self._worth(key, stored.content.tokens, size)
                self._demote(self.host.residents.admit(key, entry, size, worth) or {})
            if isinstance(stored.content, ChunkKV):
                self._to_device(key, stored.content)
        except StoreError as error:
            _LOG.debug("not kept: %s", error)

    def _adopt(self, fetched: Fetched) -> bool:
        """Whether this entry, all of it there and verified, is listed now."""
        stored, size = fetched.stored, fetched.data.numel()
        key = stored.key.digest
        if self._catalog.paths([key]):
            return True
        worth = self._worth(key, stored.content.tokens, size)
        return self._files.import_entries(stored, as_bytes(fetched.data), worth)

    @property
    def _has_device(self) -> bool:
        return self.device is not None and self.device.residents.limit_bytes > 0

    def _promote(self, got: Sequence[Got]) -> None:
        """What came from the shared tier goes its ways when all of it is there: see `_settle`."""
        for one in got:
            if one.tier == "disk" and self.host.residents.limit_bytes:
                self._reads.later(partial(self._to_host, one))
            if one.tier in ("disk", "host") and isinstance(one.content, ChunkKV) and self._has_device:
                self._reads.later(partial(self._to_device, one.key.digest, one.content))

    def _to_host(self, one: Got) -> None:
        key = one.key.digest
        try:
            data = self._files.mapped(key)
            if data is not None:
                worth = self._worth(key, one.content.tokens, len(data))
                self._demote(self.host.admit(key, data, worth))
        except StoreError as error:
            _LOG.debug("not kept in memory: %s", error)

    def _to_device(self, key: str, kv: ChunkKV) -> None:
        if self.device is None or not self._has_device:
            return
        try:
            self.device.admit(key, kv, self._worth(key, kv.tokens, kv.bytes))
        except StoreError as error:
            _LOG.debug("not kept on the device: %s", error)

    def _demote(self, gone: Mapping[str, MemoryEntry[HostEntry]]) -> None:
        """What left the host's memory and only the shared tier has goes to the disk, if that has room for it now.

        Of all else the disk had the file: what it does not list any more it evicted itself, or another process removed it.
        """
        homeless = {key: resident for key, resident in gone.items() if resident.held.only_shared}
        if not homeless or self.shared is None:
            return
        listed = self._catalog.paths(homeless)
        for key in self.shared.tier.has_many([key for key in homeless if key not in listed]):
            held, at = homeless[key].held, homeless[key].standing
            self._files.import_entries(held.stored, as_bytes(held.data), at)

    def _worth(self, key: str, tokens: int, size_bytes: int) -> float:
        """The standing of an entry that was retrieved just now."""
        now = self._catalog.now_s()
        before = self._catalog.standings([key]).get(key)
        if before is None and self.shared is not None:
            before = self.shared.rows.standing(key)
        if before is None:
            return standing(1, tokens, size_bytes, now)
        return after_retrievals(before, 1, tokens, size_bytes, now)
