"""The store of chunk KV and features as its callers see it: look up, put, own, and the caps, statistics and checks of the whole.

Names entries and passes the work on: the catalogue says which entries there are, the tiers hold them (`assembly.py` puts
both together). A damaged, missing or mismatched entry is a counted, logged miss: never used, never fatal. Knows nothing
about requests, or about models beyond their fingerprint.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from kvweave.database import Database
from kvweave.errors import InvalidRequest
from kvweave.kvstore.assembly import StoreComponents, assemble
from kvweave.kvstore.format import Content, is_finite
from kvweave.kvstore.keys import ContentKind, EntryKey, digest_tokens
from kvweave.kvstore.reports import TIERS, StoreStats, TierName, TierTotals, VerifyReport
from kvweave.kvstore.tiers import disk_check
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.kvstore.tiers.replication import ReplicatedTier
from kvweave.kvstore.tiers.tiered import Found, LookUp
from kvweave.kvstore.warned import WarnedTopics
from kvweave.ops.quantise import NOT_FINITE
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint

_LOG = logging.getLogger(__name__)


class ChunkStore:
    """Chunk KV and chunk features under one folder and in other tiers, each tier under a cap; a context manager.

    KV and features have separate keys: a look-up of one never finds the other, whatever their provenance. Everything else
    is the same for both.

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
        limits: dict[TierName, int | None] = {"host": host_bytes, "disk": limit_bytes, "shared": shared_bytes}
        given = {tier: size for tier, size in limits.items() if size is not None}
        self.components = assemble(self.folder, namespace, given, shared, database, owned_only)
        self._tiers = self.components.tiers
        self._usage = self.components.usage
        self._warned = WarnedTopics(_LOG)

    # Looking up

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """Return one entry with every layer verified, or None; see `find`."""
        with self.lease() as lease:
            (found,) = self._find(model, "kv", [(token_ids, [provenance])], lease, whole=True)
        return None if found is None else _as_kv(found.content)

    def find(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None = None,
    ) -> list[tuple[ChunkKV, KVProvenance] | None]:
        """Look up the KV of several spans: one query for all, then the fastest tier that has each.

        Spans that are not listed on this machine are looked up in the shared tier.

        A layer is verified when it is first used. If it is damaged, using it raises DamagedEntry, and the entry is
        dropped, counted and logged: look up again.

        Each span counts as one hit or one miss, whatever the number of provenances; without any, it is not counted.

        Args:
            model: only entries made by a model with an equal digest are found.
            wanted: for each span its S token ids and the acceptable provenances, best first (`kind` does not matter for
                an exact one). If one is stored but turns out damaged or lost, the next one is tried.
            lease: keeps the entries from being evicted while it lasts, and lets those of the shared tier arrive layer by
                layer. Without a lease, all layers are there when this returns.

        Returns:
            For each span, in order, the KV and the provenance that it matched, the very object given; or None. KV is a
            read-only view of the mapped file or of memory. It stays valid when the entry is evicted or removed; callers must
            not write to it.
        """
        found = self._find(model, "kv", wanted, lease)
        return [
            None
            if one is None
            else (
                replace(_as_kv(one.content), entry=f"{self.folder}:{one.key.digest}"),
                one.key.provenance,
            )
            for one in found
        ]

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Look up several features: one query for all, then the files, mapped, verified and counted as by `find`.

        Args:
            model: only features recorded for a model with an equal digest are found.
            wanted: for each feature its chunk's S token ids and its provenance, `kind` included.

        Returns:
            For each, in order, the feature, its tensors read-only views of the mapped file; or None.
        """
        with self.lease() as lease:
            look_ups = [(ids, [provenance]) for ids, provenance in wanted]
            found = self._find(model, "note", look_ups, lease)
        return [None if one is None else _as_feature(one.content) for one in found]

    def lease(self) -> Lease:
        """Return a lease for one request, for `prefetch` and `find`: a context manager."""
        return self._tiers.lease()

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Begin to load KV in the background that `find` will be asked for; not counted.

        Args:
            model: as in `find`.
            wanted: for each span the digest of its tokens and the acceptable provenances, best first; the first of them
                that is stored is loaded.
            lease: cancels the loads that were not used, when it ends.
        """
        keys = [
            [self._key(model, tokens, provenance) for provenance in provenances]
            for tokens, provenances in wanted
        ]
        self._tiers.prefetch(keys, lease)

    def import_entries(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Copy KV that only the shared tier has to this machine's disk, instead of computing it; not counted.

        Args:
            model: as in `find`.
            wanted: for each entry its token ids and its provenance.

        Returns:
            For each, in order, whether it is listed here now.
        """
        return self._import(model, "kv", wanted)

    def import_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Copy features that only the shared tier has to this machine's disk; as `import_entries` does with KV."""
        return self._import(model, "note", wanted)

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether each entry of KV is listed, by one query; reads no file and is not counted.

        Args:
            model: the model that made it.
            wanted: for each entry the digest of its tokens (`digest_tokens`) and its provenance.
        """
        return self._listed(model, "kv", wanted)

    def has_features(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Return whether each feature is listed; as `has_many` does for KV."""
        return self._listed(model, "note", wanted)

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """Return the provenances of all KV of several chunks, by one query; reads no file and is not counted.

        One chunk's KV can be stored after several prefixes (Cache-Craft, RAGCache): compare their contexts, then
        `find` the one that fits best.

        Args:
            model: only KV made by a model with an equal digest is listed.
            chunks: the token ids of each chunk.

        Returns:
            For each chunk, in order, the provenances of all its KV in this namespace, the most used first, of the
            uses written by now. An exact one has the kind that it was first put with.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        found = self.components.catalog.versions(self.namespace, model.digest, digests)
        return [found.get(digest, []) for digest in digests]

    # Storing

    def put(
        self,
        model: ModelFingerprint,
        kv: ChunkKV,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store KV of one chunk, evicting the entries with the lowest scores if it needs room.

        Room is made before the file is written, so the cap holds at every moment. If the write then fails, the evicted
        entries are gone all the same.

        Args:
            model: the model that made it.
            kv: shape (L, 2, G, S, D), float32, bfloat16 or float16, keys before rotation; or such KV quantised, with a
                provenance that says so (`keys.quantised`). The store does not keep the tensors.
            provenance: the pass that computed it.
            sources: token digests (`digest_tokens`) of the chunks it was made from: its own and every chunk
                in its context, but not the shared system prefix. If one of them loses its last owner, the entry is dropped.
            max_versions: how many entries of this chunk and `provenance.kind` may be stored from then on, this
                one included. The least used ones beyond that are dropped in the transaction that lists this one,
                and count as evicted. None drops none.

        Returns:
            True if the store now holds an entry of this key, possibly an earlier one. False, with nothing left behind, if
            the entry is larger than the cap, or the disk is full; each is logged once. Also False if the store is `owned_only`
            and one of the sources has no owner any more.

        Raises:
            InvalidRequest: a shape, dtype or kind that cannot be stored; NaN or infinity; `max_versions` less than 1.
            StoreBusy: the catalogue was locked for too long.
            OSError: the file system failed in another way.
        """
        key = self._key(model, digest_tokens(kv.token_ids), provenance)
        return self._put(key, model, kv, sources, max_versions)

    def put_feature(
        self,
        model: ModelFingerprint,
        feature: ChunkFeature,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store a feature of one chunk; otherwise as `put`.

        Args:
            model: the model it was recorded with.
            feature: see ChunkFeature for what its tensors may be. The store does not keep them.
            provenance: the pass that recorded it; `kind` says what was recorded, and is always part of its key.
            sources: as for KV, all chunks that it describes or depends on.
            max_versions: as for KV.
        """
        key = self._key(model, digest_tokens(feature.token_ids), provenance, "note")
        return self._put(key, model, feature, sources, max_versions)

    # Documents

    def own(self, owner: str, chunk_digests: Iterable[str]) -> None:
        """Record that the document `owner` has these chunks, in addition to those it has already.

        In an `owned_only` store, own the chunks in the transaction that lists the document, then put their entries. If
        the document is removed in between, its KV is not stored any more. When a document changes, own the new version's
        chunks (under an owner of its own) before disowning the old version. The entries that both share then stay.
        """
        self.components.ownership.own(owner, chunk_digests)

    def disown(self, owner: str) -> int:
        """Forget a document and drop every entry made from a chunk that no document has any more.

        Entries with such a chunk in their context are dropped too. They are gone at the commit (of the surrounding
        transaction, if the database is shared). The files are deleted right after it, and published copies as
        soon as the shared tier can be reached.

        Returns:
            How many entries were dropped.
        """
        with self.components.database.transaction():
            dropped = self._tiers.disk.drop_files(self.components.ownership.disown(owner))
            self._replicate()
        return dropped

    # The store as a whole

    @property
    def limit_bytes(self) -> int:
        """The hard cap on the size of all files, in bytes."""
        return self._tiers.disk.limit_bytes

    @property
    def read_only(self) -> bool:
        """Whether the folder cannot be written to: entries are found, and none is stored, evicted or dropped."""
        return self.components.database.read_only

    @property
    def used_bytes(self) -> int:
        """Bytes of all listed files, of all namespaces; cheaper than `stats`, and writes nothing."""
        return self._tiers.disk.used_bytes

    @property
    def times_full(self) -> int:
        """How often this object has not stored an entry because the disk was full."""
        return self._tiers.disk.times_full

    @property
    def evicted(self) -> int:
        """How many entries this object has evicted from the disk."""
        return self._tiers.disk.evicted

    @property
    def unused_bytes(self) -> int:
        """The size of the files that no look-up has ever found: most of them are evicted first."""
        self._usage.try_flush()
        return self.components.catalog.unused_bytes()

    def other_models(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[str]:
        """Return the names of other models that have made KV of these chunks, given by their token ids.

        Reads no file and is not counted.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        return self.components.catalog.other_models(self.namespace, model.digest, digests)

    def prepared_chunks(self, model: ModelFingerprint) -> int:
        """Return how many chunks have KV of this model that was prepared, not left by a request; reads every row."""
        return self.components.catalog.prepared_chunks(self.namespace, model.digest)

    def retrieved_chunks(self) -> dict[str, int]:
        """Return how often the KV of each chunk was looked up for a prompt, found or not, by its token digest."""
        self._usage.try_flush()
        return self.components.catalog.retrieved()

    def warn_once(self, topic: str, message: Callable[[], str]) -> None:
        """Log a warning, unless the topic was warned of since the store was opened; an empty message is none."""
        self._warned.warn(topic, message)

    def set_limit(self, limit_bytes: int, tier: TierName = "disk") -> None:
        """Change a tier's cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: other programs have filled the disk to the last byte, so that the change cannot be recorded.
        """
        self._usage.try_flush()
        if tier != "disk":
            self.components.capacity.limits.set(tier, limit_bytes)
        if tier == "shared":
            if self._tiers.shared is not None:
                self._tiers.shared.make_room(0, float("inf"))
        elif (local := self._tiers.local(tier)) is not None:
            local.set_limit(limit_bytes)

    def clear(self, tier: TierName = "disk") -> int:
        """Drop every entry of a tier; return how many.

        Ownership stays. Clearing the disk drops the entries of all namespaces, and everything in memory. Clearing the shared
        tier drops the entries of this namespace.
        """
        if tier == "shared":
            if self._tiers.shared is None:
                raise InvalidRequest("there is no shared tier; set `shared` to its address")
            return self._tiers.shared.clear()
        if tier == "disk":
            self._tiers.clear_memory()
        local = self._tiers.local(tier)
        return 0 if local is None else local.clear()

    def stats(self) -> StoreStats:
        """Return how much is stored, and how it was used since the store was created."""
        self._usage.try_flush()
        by_kind, counts = self.components.catalog.totals(), self._usage.totals()
        disk = TierTotals(
            entries=sum(kind.entries for kind in by_kind.values()),
            bytes=sum(kind.bytes for kind in by_kind.values()),
            limit_bytes=self.limit_bytes,
            hits=counts["hits_disk"],
        )
        by_tier = {
            tier: disk if tier == "disk" else _tier_totals(self.components, tier, counts[f"hits_{tier}"])
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
            report = disk_check.verify(self._tiers.disk)
        if tier in (None, "shared") and self._tiers.shared is not None:
            report = self._tiers.shared.verify(report)
        return report

    def attach_device(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """Keep copies of the most used KV on the model's device, as many as the cap allows.

        Args:
            device: for a CPU this does nothing: its memory is the host's.
            limit_bytes: the cap, kept from then on; None leaves the cap as it is, at first 0, which holds none.
        """
        limits = self.components.capacity.limits
        if limit_bytes is not None:
            limits.set("device", limit_bytes)
        if device.type != "cpu":
            # Attached with a cap of 0 too: it may be raised later.
            self._tiers.attach(DeviceTier(device, limits.get("device"), self.components.pins.in_use))

    def forget_recent(self) -> None:
        """Drop all copies in memory and all mappings: the next look-up reads its file from the disk and verifies it.

        The kernel is asked to drop the pages of all files (not on macOS). It keeps pages that are still mapped: drop
        references to found KV first.
        """
        self._tiers.clear_memory()
        self.forget_files()

    def forget_files(self) -> None:
        """As `forget_recent`, but keep the copies in the memory tiers of host and device."""
        files = self._tiers.disk.files
        files.forget()
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for name in self.components.catalog.all_paths():
            with suppress(OSError), files.path(name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Write the counters, publish what is queued, and release everything but a database that was given."""
        self.components.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _key(
        self, model: ModelFingerprint, tokens: str, provenance: KVProvenance, content: ContentKind = "kv"
    ) -> EntryKey:
        return EntryKey(self.namespace, model.digest, tokens, provenance, content)

    def _look_up(
        self,
        model: ModelFingerprint,
        content: ContentKind,
        token_ids: Sequence[int],
        provenances: Sequence[KVProvenance],
    ) -> LookUp:
        tokens = digest_tokens(token_ids) if provenances else ""
        keys = [self._key(model, tokens, provenance, content) for provenance in provenances]
        return LookUp(keys, token_ids)

    def _find(
        self,
        model: ModelFingerprint,
        content: ContentKind,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None,
        *,
        whole: bool = False,
    ) -> list[Found | None]:
        """Return for each span the first provenance that is stored, `whole`: with every layer verified; counted."""
        look_ups = [self._look_up(model, content, ids, provenances) for ids, provenances in wanted]
        found = self._tiers.find(look_ups, lease, whole=whole)
        self._usage.record_hits((one.key.digest, one.tier) for one in found if one is not None)
        tried = (one for one, each in zip(found, look_ups, strict=True) if each.candidates)
        self._usage.add("misses", sum(one is None for one in tried))
        if content == "kv" and not whole:  # for a prompt
            first = (each.candidates[0] for each in look_ups if each.candidates)
            self._usage.record_retrieved((key.namespace, key.tokens) for key in first)
        if self._usage.is_flush_due:
            self._usage.try_flush()
        return found

    def _import(
        self,
        model: ModelFingerprint,
        content: ContentKind,
        wanted: Sequence[tuple[Sequence[int], KVProvenance]],
    ) -> list[bool]:
        look_ups = [self._look_up(model, content, ids, [provenance]) for ids, provenance in wanted]
        return self._tiers.import_missing(look_ups)

    def _listed(
        self, model: ModelFingerprint, content: ContentKind, wanted: Sequence[tuple[str, KVProvenance]]
    ) -> list[bool]:
        keys = [self._key(model, tokens, provenance, content).digest for tokens, provenance in wanted]
        paths = self.components.catalog.paths(keys)
        return [key in paths for key in keys]

    def _put(
        self,
        key: EntryKey,
        model: ModelFingerprint,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        if max_versions is not None and max_versions < 1:
            raise InvalidRequest(
                f"max_versions is {max_versions}; the entry itself is one, so give 1 or more"
            )
        if key.digest in self.components.catalog.paths([key.digest]):
            return True
        if not is_finite(content):
            raise InvalidRequest(f"KV or a feature of NaN or infinity is not stored: {NOT_FINITE}")
        stored = self._tiers.disk.put(key, model.name, content, sources, max_versions)
        self._replicate()
        return stored

    def _replicate(self) -> None:
        """Process the replication queue soon, once the current transaction is committed."""
        if self.components.replication is not None:
            self.components.database.after_commit(self.components.replication.wake)


def _as_kv(content: Content) -> ChunkKV:
    assert isinstance(content, ChunkKV)  # its key says so, and reading compared it
    return content


def _as_feature(content: Content) -> ChunkFeature:
    assert isinstance(content, ChunkFeature)  # as in _as_kv
    return content


def _tier_totals(store: StoreComponents, tier: TierName, hits: int) -> TierTotals:
    limit_bytes, tiers = store.capacity.limits.get(tier), store.tiers
    if tier == "shared":
        return _shared_totals(tiers.shared, limit_bytes, hits)
    local = tiers.local(tier)
    if local is None:
        return TierTotals(0, 0, limit_bytes, hits, state="none")
    return TierTotals(len(local.sizes()), local.used_bytes, limit_bytes, hits, state="of this process")


def _shared_totals(shared: ReplicatedTier | None, limit_bytes: int, hits: int) -> TierTotals:
    if shared is None:
        return TierTotals(0, 0, limit_bytes, hits, state="none")
    total = shared.rows.total(shared.namespace)
    trouble = " (refuses changes)" if shared.tier.refusing else ""
    trouble = " (does not answer)" if shared.tier.failing else trouble
    state = shared.tier.location + trouble
    return TierTotals(total.entries, total.bytes, limit_bytes, hits, shared.queue_length, state)
