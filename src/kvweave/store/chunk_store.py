"""The store of chunk KV and notes, as everything else sees it: look up, put, own, limit, verify.

Brings together the catalogue (what counts), the files, the cap and the counters. A damaged, missing or
mismatched entry is a counted, logged miss: never used, never fatal. Knows nothing about requests or models
beyond their fingerprint.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

from kvweave.core import ChunkKV, ChunkNote, Making, ModelFingerprint
from kvweave.errors import InvalidRequest, StoreError
from kvweave.store.capacity import Capacity, check_limit
from kvweave.store.catalog import Catalog
from kvweave.store.database import Database
from kvweave.store.disk import DiskTier
from kvweave.store.entry_files import EntryFiles
from kvweave.store.format import Content
from kvweave.store.keys import ContentKind, EntryKey, digest_tokens
from kvweave.store.ownership import Ownership
from kvweave.store.recent import RecentEntries
from kvweave.store.reports import StoreStats, VerifyReport
from kvweave.store.tallies import Tallies
from kvweave.store.verify import check_entries


class ChunkStore:
    """Chunk KV, and notes about chunks, under one folder, capped in size; a context manager.

    The two are named apart: a look-up of one never finds the other, whatever their making. Everything else
    holds for both alike.

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
        self._files = EntryFiles(
            self._database,
            self._catalog,
            self._tier,
            self._capacity,
            self._ownership if owned_only else None,
            self._recent,
            self._tallies,
        )
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        if self._tier.sweep_is_due():
            self._files.sweep()

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
            wanted: for each span its S token ids and the makings that will do, best first (of an exact one
                `kind` does not matter). Where one is stored but damaged or gone meanwhile, the next one is taken.

        Returns:
            For each span, in order, the KV as a read-only view of the mapped file with the making that it
            matched, the very object given; or None. The views stay valid when the entry is evicted or
            removed; nobody writes to them.
        """
        found = self._find(model, "kv", wanted)
        return [None if one is None else (_kv(one[0]), one[1]) for one in found]

    def find_notes(
        self, model: ModelFingerprint, wanted: Sequence[tuple[Sequence[int], Making]]
    ) -> list[ChunkNote | None]:
        """Look up several notes: one query for all, then the files, mapped, verified and counted as by `find`.

        Args:
            model: only what was recorded for a model with an equal digest is found.
            wanted: for each note its chunk's S token ids and how it was made, `kind` included.

        Returns:
            For each, in order, the note, its tensors read-only views of the mapped file; or None.
        """
        found = self._find(model, "note", [(ids, [making]) for ids, making in wanted])
        return [None if one is None else _note(one[0]) for one in found]

    def has_many(self, model: ModelFingerprint, wanted: Sequence[tuple[str, Making]]) -> list[bool]:
        """Whether KV of each is listed, by one query; reads no file and counts as no retrieval.

        Args:
            model: the model that made it.
            wanted: for each entry the digest of its tokens (`digest_tokens`) and how it was made.
        """
        return self._listed([self._key(model, tokens, making) for tokens, making in wanted])

    def has_notes(self, model: ModelFingerprint, wanted: Sequence[tuple[str, Making]]) -> list[bool]:
        """Whether a note of each is listed; as `has_many` does for KV."""
        return self._listed([self._key(model, tokens, making, "note") for tokens, making in wanted])

    def versions(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[list[Making]]:
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
        found = self._catalog.versions(self.namespace, model.digest, digests)
        return [found.get(digest, []) for digest in digests]

    # Storing

    def put(
        self,
        model: ModelFingerprint,
        kv: ChunkKV,
        making: Making,
        sources: Sequence[str],
        *,
        most_versions: int | None = None,
    ) -> bool:
        """Store KV of one chunk, evicting the least used ones where it needs room.

        Room is made before the file is written, so that the cap holds all the time; a write that fails all
        the same has cost what stood there.

        Args:
            model: the model that made it.
            kv: shape (L, 2, G, S, D), float32, bfloat16 or float16, keys before rotation; not kept.
            making: the pass it came out of.
            sources: token digests (`digest_tokens`) of the chunks it was made from, its own and every chunk
                in its context; not the shared system prefix. Any of them losing its last owner drops it.
            most_versions: how many entries of this chunk and `making.kind` may be stored from then on, this
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
        if most_versions is not None and most_versions < 1:
            raise InvalidRequest(
                f"most_versions is {most_versions}; the entry itself is one, so give 1 or more"
            )
        key = self._key(model, digest_tokens(kv.token_ids), making)
        return self._put(key, model, kv, sources, most_versions)

    def put_note(
        self, model: ModelFingerprint, note: ChunkNote, making: Making, sources: Sequence[str]
    ) -> bool:
        """Store a note about one chunk; as `put` in all else.

        Args:
            model: the model it was recorded with.
            note: its tensors, see ChunkNote for what they may be; not kept.
            making: the pass it came out of; `kind` says what was recorded, and is always part of its name.
            sources: as for KV, all chunks that it tells something about or depends on.
        """
        key = self._key(model, digest_tokens(note.token_ids), making, "note")
        return self._put(key, model, note, sources, None)

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
            return self._files.discard(self._ownership.disown(owner))

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
        self._tallies.flush_quietly()
        return self._catalog.unasked_bytes()

    def set_limit(self, limit_bytes: int) -> None:
        """Change the cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: others have filled the disk to the last byte, so that the change cannot be recorded.
        """
        self._tallies.flush_quietly()
        with self._database.transaction():
            self._files.evict(self._capacity.set_limit(limit_bytes))

    def clear(self) -> int:
        """Drop every entry in the folder, of all namespaces; who owns which chunk stays. Returns how many."""
        with self._database.transaction():
            return self._files.discard(self._catalog.drop_all())

    def stats(self) -> StoreStats:
        """How much is stored, and how it was used since the store was made."""
        self._tallies.flush_quietly()
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
        dropped = tuple(why for name, why in found.damaged.items() if self._files.drop_damaged(name, why))
        return VerifyReport(
            checked=found.checked,
            damaged=dropped,
            newer=tuple(found.newer.values()),
            unopened=tuple(found.unopened.values()),
            swept_files=self._files.sweep(),
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
        self._tallies.flush_quietly()
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

    def _key(
        self, model: ModelFingerprint, tokens: str, making: Making, content: ContentKind = "kv"
    ) -> EntryKey:
        return EntryKey(self.namespace, model.digest, tokens, making, content)

    def _find(
        self,
        model: ModelFingerprint,
        content: ContentKind,
        wanted: Sequence[tuple[Sequence[int], Sequence[Making]]],
    ) -> list[tuple[Content, Making] | None]:
        spans = [(ids, self._candidates(model, content, ids, makings)) for ids, makings in wanted]
        paths = self._catalog.paths(key.digest for _, candidates in spans for key in candidates)
        found = [self._first_readable(paths, ids, candidates) for ids, candidates in spans]
        self._tallies.hit(key.digest for _, key in filter(None, found))
        self._tallies.add(
            "misses",
            sum(one is None for one, (_, candidates) in zip(found, spans, strict=True) if candidates),
        )
        if self._tallies.due:
            self._tallies.flush_quietly()
        return [None if one is None else (one[0], one[1].making) for one in found]

    def _listed(self, keys: Sequence[EntryKey]) -> list[bool]:
        paths = self._catalog.paths([key.digest for key in keys])
        return [key.digest in paths for key in keys]

    def _candidates(
        self, model: ModelFingerprint, content: ContentKind, ids: Sequence[int], makings: Sequence[Making]
    ) -> list[EntryKey]:
        tokens = digest_tokens(ids) if makings else ""
        return [self._key(model, tokens, making, content) for making in makings]

    def _first_readable(
        self, paths: Mapping[str, str], ids: Sequence[int], candidates: Sequence[EntryKey]
    ) -> tuple[Content, EntryKey] | None:
        for key in candidates:
            path = paths.get(key.digest)
            content = None if path is None else self._files.read(path, key, ids)
            if content is not None:
                return content, key
        return None

    def _put(
        self,
        key: EntryKey,
        model: ModelFingerprint,
        content: Content,
        sources: Sequence[str],
        most: int | None,
    ) -> bool:
        if key.digest in self._catalog.paths([key.digest]):
            return True
        return self._files.write(key, model.name, content, sources, most)


def _kv(content: Content) -> ChunkKV:
    assert isinstance(content, ChunkKV)  # its key says so, and reading compared it
    return content


def _note(content: Content) -> ChunkNote:
    assert isinstance(content, ChunkNote)  # as in _kv
    return content
