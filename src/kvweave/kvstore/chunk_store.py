"""The store of chunk KV and notes, as everything else sees it: look up, put, own, limit, verify.

Names entries and hands over to the parts: the catalogue says what counts, the tiers have it (`parts.py` puts them
together). A damaged, missing or mismatched entry is a counted, logged miss: never used, never fatal. Knows nothing
about requests or models beyond their fingerprint.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from kvweave.database import Database
from kvweave.errors import InvalidRequest
from kvweave.kvstore import maintenance as care
from kvweave.kvstore.format import Content
from kvweave.kvstore.keys import ContentKind, EntryKey, digest_tokens
from kvweave.kvstore.parts import StoreParts, open_parts
from kvweave.kvstore.reports import StoreStats, TierName, VerifyReport
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.tiered import Asked, Got
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint


class LookUps:
    """Look-ups in one namespace, of entries made by the model of which a digest is given."""

    def __init__(self, namespace: str, parts: StoreParts) -> None:
        self._namespace = namespace
        self._parts = parts

    def find(
        self,
        model: str,
        content: ContentKind,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None,
        *,
        whole: bool = False,
    ) -> list[tuple[Content, KVProvenance] | None]:
        """For each of these token ids the first of the makings that there is, `whole`: every layer verified; counted."""
        asked = [
            Asked(self._candidates(model, content, ids, provenances), ids) for ids, provenances in wanted
        ]
        found = self._parts.tiers.find(asked, lease, whole=whole)
        self._count(asked, found)
        return [None if one is None else (one.content, one.key.provenance) for one in found]

    def import_entries(
        self, model: str, content: ContentKind, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Bring what only the shared tier has to the disk; whether each is listed now. Not counted."""
        asked = [
            Asked(self._candidates(model, content, ids, [provenance]), ids) for ids, provenance in wanted
        ]
        return self._parts.tiers.adopt_missing(asked)

    def listed(
        self, model: str, content: ContentKind, wanted: Sequence[tuple[str, KVProvenance]]
    ) -> list[bool]:
        """Whether the catalogue lists each, given by the digest of its tokens, by one query. Not counted."""
        keys = [
            EntryKey(self._namespace, model, tokens, provenance, content).digest
            for tokens, provenance in wanted
        ]
        paths = self._parts.catalog.paths(keys)
        return [key in paths for key in keys]

    def _candidates(
        self, model: str, content: ContentKind, ids: Sequence[int], provenances: Sequence[KVProvenance]
    ) -> list[EntryKey]:
        tokens = digest_tokens(ids) if provenances else ""
        return [EntryKey(self._namespace, model, tokens, provenance, content) for provenance in provenances]

    def _count(self, asked: Sequence[Asked], found: Sequence[Got | None]) -> None:
        usage = self._parts.usage
        usage.hit((one.key.digest, one.tier) for one in found if one is not None)
        usage.add(
            "misses",
            sum(one is None for one, each in zip(found, asked, strict=True) if each.candidates),
        )
        if usage.due:
            usage.flush_quietly()


class ChunkStore:
    """Chunk KV, and notes about chunks, under one folder and in other tiers, each capped; a context manager.

    The two are named apart: a look-up of one never finds the other, whatever their making. Everything else
    holds for both alike.

    Several processes may use one folder, several threads one store, and several machines one shared tier. The disk's
    cap holds for the files that the catalogue lists; beside them each process may have one more file under way, for
    which it has made room beforehand.

    Args:
        folder: where the files go; made if it is not there.
        namespace: part of every key; entries and owners of other namespaces are never seen.
        limit_bytes: the hard cap on the files, kept from then on; None leaves it as it is, at first 10 % of the free
            space, at most 20 GB.
        host_bytes: the same for copies in this process's memory; at first 0, which holds none.
        shared: address of a tier that several machines share, redis://… or s3://…; None for none.
        shared_bytes: the cap there, of this namespace; at first 20 GB.
        database: where the catalogue goes, if it shares the transactions of others; None for
            `catalog.sqlite` in the folder, closed with the store.
        owned_only: refuse entries made from a chunk that no document owns (see `own`).

    Raises:
        StoreError: the folder cannot be made or its catalogue not be read; StoreTooNew, StoreBusy.
        InvalidRequest: a negative limit, or an address that means nothing.
        MissingExtra: what it takes to talk to the shared tier is not installed. One that does not answer is no error.
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
        self._parts = open_parts(self.folder, namespace, given, shared, database, owned_only)
        self._look_ups = LookUps(namespace, self._parts)

    # Looking up

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """One entry, every layer verified, or None; see `find`."""
        with self.lease() as lease:
            (found,) = self._look_ups.find(model.digest, "kv", [(token_ids, [provenance])], lease, whole=True)
        return None if found is None else _kv(found[0])

    def find(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], Sequence[KVProvenance]]],
        lease: Lease | None = None,
    ) -> list[tuple[ChunkKV, KVProvenance] | None]:
        """Look up the KV of several spans: one query for all, then the fastest tier that has each.

        Of spans of which nothing is listed here, the shared tier is asked.

        A layer is verified when it is first asked for. If it is damaged, asking raises DamagedEntry, and the entry is
        dropped, counted and logged: look up again.

        Counted as one hit or one miss for each span, whatever the number of makings; as nothing without any.

        Args:
            model: only what was made by a model with an equal digest is found.
            wanted: for each span its S token ids and the makings that will do, best first (of an exact one
                `kind` does not matter). Where one is stored but found damaged or gone, the next one is taken.
            lease: keeps what is found from being evicted as long as it lasts, and has what is found in the shared tier come layer by
                layer; without one that is there when this returns.

        Returns:
            For each span, in order, the KV as a read-only view of the mapped file or of memory, with the making that it
            matched, the very object given; or None. The views stay valid when the entry is evicted or
            removed; nobody writes to them.
        """
        found = self._look_ups.find(model.digest, "kv", wanted, lease)
        return [None if one is None else (_kv(one[0]), one[1]) for one in found]

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Look up several notes: one query for all, then the files, mapped, verified and counted as by `find`.

        Args:
            model: only what was recorded for a model with an equal digest is found.
            wanted: for each note its chunk's S token ids and how it was made, `kind` included.

        Returns:
            For each, in order, the note, its tensors read-only views of the mapped file; or None.
        """
        with self.lease() as lease:
            asked = [(ids, [provenance]) for ids, provenance in wanted]
            found = self._look_ups.find(model.digest, "note", asked, lease)
        return [None if one is None else _feature(one[0]) for one in found]

    def lease(self) -> Lease:
        """What one request holds of the store: a context manager for `prefetch` and `find`."""
        return self._parts.tiers.lease()

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Begin to load KV that `find` will be asked for, in the background; counts as no retrieval.

        Args:
            model: as in `find`.
            wanted: for each span the digest of its tokens and the makings that will do, best first; what is loaded
                is the first of them that is stored.
            lease: cancels what was not used, when it ends.
        """
        keys = [
            [self._key(model, tokens, provenance) for provenance in provenances]
            for tokens, provenances in wanted
        ]
        self._parts.tiers.prefetch(keys, lease)

    def import_entries(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Bring KV that only the shared tier has to this machine's disk, instead of computing it; no retrieval.

        Args:
            model: as in `find`.
            wanted: for each entry its token ids and how it was made.

        Returns:
            For each, in order, whether it is listed here now.
        """
        return self._look_ups.import_entries(model.digest, "kv", wanted)

    def import_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[bool]:
        """Bring notes that only the shared tier has to this machine's disk; as `import_entries` does with KV."""
        return self._look_ups.import_entries(model.digest, "note", wanted)

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Whether KV of each is listed, by one query; reads no file and counts as no retrieval.

        Args:
            model: the model that made it.
            wanted: for each entry the digest of its tokens (`digest_tokens`) and how it was made.
        """
        return self._look_ups.listed(model.digest, "kv", wanted)

    def has_features(self, model: ModelFingerprint, wanted: Sequence[tuple[str, KVProvenance]]) -> list[bool]:
        """Whether a note of each is listed; as `has_many` does for KV."""
        return self._look_ups.listed(model.digest, "note", wanted)

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """Every way in which KV of several chunks was made, by one query; reads no file and counts as no retrieval.

        One chunk's KV can be stored behind several paths (Cache-Craft, RAGCache): compare their contexts, then
        `find` the one that fits best.

        Args:
            model: only what was made by a model with an equal digest is listed.
            chunks: the token ids of each chunk.

        Returns:
            For each chunk, in order, the makings of all its KV in this namespace, the most used first as far
            as uses are written by now. An exact one bears the kind that it was first put with.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        found = self._parts.catalog.versions(self.namespace, model.digest, digests)
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
        """Store KV of one chunk, evicting the least used ones where it needs room.

        Room is made before the file is written, so that the cap holds all the time; a write that fails all
        the same has cost what stood there.

        Args:
            model: the model that made it.
            kv: shape (L, 2, G, S, D), float32, bfloat16 or float16, keys before rotation, or such KV quantised, under a
                making that says so (`keys.quantised`); not kept.
            making: the pass it came out of.
            sources: token digests (`digest_tokens`) of the chunks it was made from, its own and every chunk
                in its context; not the shared system prefix. Any of them losing its last owner drops it.
            most_versions: how many entries of this chunk and `provenance.kind` may be stored from then on, this
                one included; the least used ones beyond that are dropped in the transaction that lists it,
                and count as evicted. None drops none.

        Returns:
            True if the store now holds an entry of this key, an earlier one too. False, with nothing left
            behind, if it is larger than the cap or the disk is full, which is logged once; or if the store is
            `owned_only` and no document has one of the sources any more.

        Raises:
            InvalidRequest: a shape, dtype or kind that cannot be stored; less than one version.
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
        """Store a note about one chunk; as `put` in all else.

        Args:
            model: the model it was recorded with.
            note: its tensors, see ChunkFeature for what they may be; not kept.
            making: the pass it came out of; `kind` says what was recorded, and is always part of its name.
            sources: as for KV, all chunks that it tells something about or depends on.
            most_versions: as for KV.
        """
        key = self._key(model, digest_tokens(feature.token_ids), provenance, "note")
        return self._put(key, model, feature, sources, max_versions)

    # Life of a document

    def own(self, owner: str, chunk_digests: Iterable[str]) -> None:
        """Record that the document `owner` has these chunks, beside those it has already.

        Own the chunks in the transaction that lists the document, then put their entries, in a store that is
        `owned_only`: a removal that comes in between is then never followed by KV of what was removed. When a
        document changes, own the new version's chunks (under an owner of its own) before disowning the old
        version, and what they share stays.
        """
        self._parts.ownership.own(owner, chunk_digests)

    def disown(self, owner: str) -> int:
        """Forget a document and drop every entry made from a chunk that no document has any more.

        Entries with such a chunk in their context go too. Gone at the commit (that of the surrounding
        transaction, if the database is shared); the files are deleted right after it, and what was published of it as
        soon as the shared tier can be reached.

        Returns:
            How many entries were dropped.
        """
        with self._parts.database.transaction():
            dropped = self._parts.files.discard(self._parts.ownership.disown(owner))
            self._parts.wake_later()
        return dropped

    # Limits and care

    @property
    def limit_bytes(self) -> int:
        """The hard cap on the size of all files, in bytes."""
        return self._parts.capacity.limit_bytes

    @property
    def used_bytes(self) -> int:
        """The size of all files that are listed, of all namespaces; cheaper than `stats`, and writes nothing."""
        return self._parts.catalog.total_bytes()

    @property
    def unasked_bytes(self) -> int:
        """The size of the files that no look-up has ever found: what mostly goes first when room is needed."""
        self._parts.usage.flush_quietly()
        return self._parts.catalog.unasked_bytes()

    def set_limit(self, limit_bytes: int, tier: TierName = "disk") -> None:
        """Change a tier's cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: others have filled the disk to the last byte, so that the change cannot be recorded.
        """
        care.set_limit(self._parts, tier, limit_bytes)

    def clear(self, tier: TierName = "disk") -> int:
        """Drop every entry of a tier; who owns which chunk stays. Returns how many.

        Of the disk, of all namespaces, with what is in memory; of the shared tier, those of this namespace.
        """
        return care.clear(self._parts, tier)

    def stats(self) -> StoreStats:
        """How much is stored, and how it was used since the store was made."""
        return care.stats(self._parts)

    def verify(self, tier: TierName | None = None) -> VerifyReport:
        """Read every entry in full, drop the damaged ones, sweep files that no row lists, and put counters right.

        Files younger than ten minutes are left: another process may be about to list them. `tier` disk or shared checks
        only that one; what is in memory was verified when it came there.
        """
        return care.verify(self._parts, tier)

    def attach_device(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """Keep copies of the hottest KV on the device that the model is on, as many as the cap allows.

        Args:
            device: of a CPU nothing is kept: its memory is the host's.
            limit_bytes: the cap, kept from then on; None leaves it as it is, at first 0, which holds none.
        """
        care.attach_device(self._parts, device, limit_bytes)

    def forget_recent(self) -> None:
        """Let go of what was read and written: the next look-up reads its file from the disk and verifies it.

        The kernel is asked to drop the pages of all files, where it can be asked (not on macOS). It keeps
        those that are still mapped: let go of found KV first.
        """
        self._parts.forget()

    def forget_files(self) -> None:
        """As `forget_recent`, but the copies that the host's or a device's memory holds under a cap of their own stay."""
        self._parts.forget_files()

    def close(self) -> None:
        """Write the counters, publish what is left to, and let go of everything and, unless it was given, the database."""
        self._parts.close()

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

    def _put(
        self,
        key: EntryKey,
        model: ModelFingerprint,
        content: Content,
        sources: Sequence[str],
        most: int | None,
    ) -> bool:
        if most is not None and most < 1:
            raise InvalidRequest(f"most_versions is {most}; the entry itself is one, so give 1 or more")
        if key.digest in self._parts.catalog.paths([key.digest]):
            return True
        stored = self._parts.files.write(key, model.name, content, sources, most)
        self._parts.wake_later()
        return stored


def _kv(content: Content) -> ChunkKV:
    assert isinstance(content, ChunkKV)  # its key says so, and reading compared it
    return content


def _feature(content: Content) -> ChunkFeature:
    assert isinstance(content, ChunkFeature)  # as in _kv
    return content
