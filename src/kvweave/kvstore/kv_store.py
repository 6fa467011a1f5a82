"""A store of chunk KV and chunk features as recipes and requests use it, whatever it keeps its entries in.

`ChunkStore` keeps them in files, with a cap and tiers, `MemoryStore` in one process's memory. Here look-ups and entries get
their keys. Knows nothing about requests, or about models beyond their fingerprint.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvweave.errors import InvalidRequest
from kvweave.kvstore.format import Content, is_finite
from kvweave.kvstore.keys import ContentKind, EntryKey, LookUp, digest_tokens
from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.ops.quantise import NOT_FINITE
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint


class KVStore(ABC):
    """Chunk KV and chunk features, each found by its model, its chunk's tokens and its provenance; a context manager.

    KV and features have separate keys: a look-up of one never finds the other, whatever their provenance. Only entries made
    by a model with an equal digest are found.

    Attributes:
        namespace: part of every key; entries of other namespaces are never seen.
    """

    namespace: str
    _location: object  # tells this store's entries from those of others in `ChunkKV.entry`

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The cap on the entries' size."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """The entries' size."""

    # Looking up

    def get(
        self, model: ModelFingerprint, token_ids: Sequence[int], provenance: KVProvenance
    ) -> ChunkKV | None:
        """Return one entry with every layer verified, or None; see `find`."""
        with self.lease() as lease:
            (found,) = self._find([self._look_up(model, "kv", token_ids, [provenance])], lease, whole=True)
        return None if found is None else _as_kv(found[1])

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
            model: the model that made it.
            wanted: for each span its S token ids and the acceptable provenances, best first (`kind` does not matter for
                an exact one). If one is stored but turns out damaged or lost, the next one is tried.
            lease: keeps the entries from being evicted while it lasts, and lets those of the shared tier arrive layer by
                layer. Without a lease, all layers are there when this returns.

        Returns:
            For each span, in order, the KV and the provenance that it matched, the very object given; or None. KV is a
            read-only view of the mapped file or of memory. It stays valid when the entry is evicted or removed; callers must
            not write to it.
        """
        found = self._find([self._look_up(model, "kv", *each) for each in wanted], lease)
        return [
            None
            if one is None
            else (replace(_as_kv(one[1]), entry=f"{self._location}:{one[0].digest}"), one[0].provenance)
            for one in found
        ]

    def find_features(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], KVProvenance]]
    ) -> list[ChunkFeature | None]:
        """Look up several features, given by their chunk's token ids and their provenance; otherwise as `find`.

        `kind` is always part of a feature's provenance.
        """
        with self.lease() as lease:
            look_ups = [self._look_up(model, "note", ids, [provenance]) for ids, provenance in wanted]
            found = self._find(look_ups, lease)
        return [None if one is None else _as_feature(one[1]) for one in found]

    def has_many(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[str, KVProvenance]],
        content: ContentKind = "kv",
    ) -> list[bool]:
        """Return whether each entry is listed, given the digest of its tokens and its provenance.

        Sends one query, reads no file and is not counted.
        """
        keys = [self._key(model, tokens, provenance, content).digest for tokens, provenance in wanted]
        listed = self._listed(keys)
        return [key in listed for key in keys]

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[KVProvenance]]:
        """Return the provenances of all KV of several chunks, by one query; reads no file and is not counted.

        One chunk's KV can be stored after several prefixes (Cache-Craft, RAGCache): compare their contexts, then
        `find` the one that fits best.

        Returns:
            For each chunk, given by its token ids, the provenances of all its KV in this namespace, the most used first, of the
            uses written by now. An exact one has the kind that it was first put with.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        found = self._versions(model.digest, digests)
        return [found.get(digest, []) for digest in digests]

    def import_entries(
        self,
        model: ModelFingerprint,
        wanted: Sequence[tuple[Sequence[int], KVProvenance]],
        content: ContentKind = "kv",
    ) -> list[bool]:
        """Copy entries that only a shared tier has to this machine; return whether each is listed here now; not counted."""
        return self._import([self._look_up(model, content, ids, [provenance]) for ids, provenance in wanted])

    # Loading

    def lease(self) -> Lease:
        """Return a lease for one request, for `prefetch` and `find`: a context manager."""
        return Lease(Pins())

    def prefetch(
        self, model: ModelFingerprint, wanted: Sequence[tuple[str, Sequence[KVProvenance]]], lease: Lease
    ) -> None:
        """Begin to load KV in the background that `find` will be asked for; not counted.

        `wanted` has for each span the digest of its tokens and the acceptable provenances, best first; the first of them that is
        stored is loaded. The lease cancels the loads that were not used, when it ends.
        """
        self._prefetch(
            [[self._key(model, tokens, each) for each in tried] for tokens, tried in wanted], lease
        )

    # Storing

    def put(
        self,
        model: ModelFingerprint,
        content: Content,
        provenance: KVProvenance,
        sources: Sequence[str],
        *,
        max_versions: int | None = None,
    ) -> bool:
        """Store KV or a feature of one chunk, evicting the entries with the lowest scores if it needs room.

        Room is made before the file is written, so the cap holds at every moment. If the write then fails, the evicted
        entries are gone all the same.

        Args:
            model: the model that made it.
            content: KV of shape (L, 2, G, S, D), float32, bfloat16 or float16, keys before rotation; or such KV quantised,
                with a provenance that says so (`keys.quantised`); or a feature. The store does not keep the tensors.
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
        if max_versions is not None and max_versions < 1:
            raise InvalidRequest(
                f"max_versions is {max_versions}; the entry itself is one, so give 1 or more"
            )
        kind: ContentKind = "kv" if isinstance(content, ChunkKV) else "note"
        key = self._key(model, digest_tokens(content.token_ids), provenance, kind)
        if self._listed([key.digest]):
            return True
        if not is_finite(content):
            raise InvalidRequest(f"KV or a feature of NaN or infinity is not stored: {NOT_FINITE}")
        return self._put(key, model.name, content, sources, max_versions)

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a kind of store defines

    @abstractmethod
    def _find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[tuple[EntryKey, Content] | None]:
        """Return for each look-up the first candidate that is stored, `whole`: with every layer verified; counted."""

    @abstractmethod
    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        """Return which of these keys are stored."""

    @abstractmethod
    def _versions(self, model: str, chunks: Sequence[str]) -> Mapping[str, list[KVProvenance]]:
        """Return the provenances of all KV of each chunk, the most used first."""

    @abstractmethod
    def _put(
        self,
        key: EntryKey,
        model_name: str,
        content: Content,
        sources: Sequence[str],
        max_versions: int | None,
    ) -> bool:
        """Store an entry that is not stored yet; return whether it is stored now."""

    def _import(self, look_ups: Sequence[LookUp]) -> list[bool]:
        """Return whether each entry is stored: by default there is no other tier to import from."""
        keys = [each.candidates[0].digest for each in look_ups]
        listed = self._listed(keys)
        return [key in listed for key in keys]

    def _prefetch(self, wanted: Sequence[Sequence[EntryKey]], lease: Lease) -> None:
        """Begin to load the first stored of each candidates; by default nothing has to be loaded."""
        return

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
        return LookUp([self._key(model, tokens, each, content) for each in provenances], token_ids)


def _as_kv(content: Content) -> ChunkKV:
    assert isinstance(content, ChunkKV)  # its key says so, and reading compared it
    return content


def _as_feature(content: Content) -> ChunkFeature:
    assert isinstance(content, ChunkFeature)  # as in _as_kv
    return content
