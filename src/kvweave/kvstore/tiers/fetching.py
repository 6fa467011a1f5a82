"""Fetches entries from the shared tier: each once for all requests that want it, and stored here once it is whole.

An entry can be used as soon as its beginning has arrived. The rest is read in the background, while the lease of a request that
wants it lasts. The entries take turns, one piece each, so that the layers of all of them arrive in order. A complete entry is
stored, if it is worth that. Small entries and features are read whole and verified. If reading an entry was aborted, by a failure or by a damaged layer, the next request fetches it whole.
A whole entry is found or missed like any other, so retrying ends.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvweave.errors import DamagedEntry, StoreError, StoreTooNew
from kvweave.kvstore.catalog import UsageCounters
from kvweave.kvstore.format import ParsedEntry, check_entry, parse_entry, verify_content
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.layers import LayerRanges, read_layer_ranges
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.loading import AbandonedError, IsWanted, Load, Loader
from kvweave.kvstore.tiers.streaming import PIECE_BYTES, Bandwidth, StreamingEntry, split_pieces
from kvweave.kvstore.tiers.tier import Blob, owned_copy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedEntry:
    """An entry of the shared tier, its bytes in this process's memory.

    Without `rest`, all bytes are there and verified. With it, layers are read and verified when they are used.
    """

    parsed: ParsedEntry
    rest: StreamingEntry | None = None

    @property
    def whole(self) -> bool:
        return self.rest is None or self.rest.whole


class RemoteReader:
    """Reads one namespace's entries from `tier`; `usage` counts damaged ones."""

    def __init__(
        self, namespace: str, tier: CircuitBreaker, rows: SharedCatalog, usage: UsageCounters
    ) -> None:
        self._namespace = namespace
        self._tier = tier
        self._rows = rows
        self._usage = usage
        self._bandwidth = Bandwidth()

    def fetch(self, key: EntryKey, on_abort: Callable[[], object], *, whole: bool) -> FetchedEntry | None:
        """Return an entry, or None: features and small KV whole and verified, large KV from its beginning on.

        Damage found by then is deleted, counted and logged. `whole`: read all of it now.

        `on_abort` is called before DamagedEntry is raised later on, over a layer that is altered or cannot be read. Nothing
        else is done about it: another machine may have replaced the entry, or the server not answer. Fetching the entry whole
        tells which.
        """
        try:
            if whole or key.content != "kv":
                return self._fetch_whole(key.digest)
            return self._fetch_beginning(key.digest, on_abort)
        except DamagedEntry as error:
            self.drop_damaged(key.digest, error)
        except StoreTooNew as error:
            _LOG.warning("shared entry not used: %s", error)
        return None

    def verified(self, key: str, data: Blob) -> ParsedEntry:
        """Copy an entry's bytes and verify all of them; raise DamagedEntry or StoreTooNew."""
        entry = parse_entry(owned_copy(data), self._where(key))
        check_entry(entry, key, None, self._where(key))
        verify_content(entry.content)
        return entry

    def drop_damaged(self, key: str, error: DamagedEntry) -> None:
        """Delete an entry that cannot be used; count and log it."""
        _LOG.warning("shared entry dropped: %s", error)
        self._usage.add("damaged")
        try:
            if self._tier.delete([key]):
                self._rows.remove(self._namespace, [key])
        except StoreError as refused:  # the next listing corrects the rows
            _LOG.debug("deleted there, but still in the catalogue: %s", refused)

    def _fetch_whole(self, key: str) -> FetchedEntry | None:
        data = self._tier.get_many([key]).get(key)
        return None if data is None else FetchedEntry(self.verified(key, data))

    def _fetch_beginning(self, key: str, on_abort: Callable[[], object]) -> FetchedEntry | None:
        """Fetch an entry's first bytes, which are often all of them."""
        beginning = self._read(key, [(0, PIECE_BYTES)])
        if beginning is None:
            return None
        if len(beginning[0]) < PIECE_BYTES:
            return FetchedEntry(self.verified(key, beginning[0]))
        first = owned_copy(beginning[0])
        layers = self._layer_ranges(key, first)
        if layers is None or layers.first > PIECE_BYTES or layers.bytes <= PIECE_BYTES:
            return self._fetch_whole(key)
        try:
            data = torch.empty(layers.bytes, dtype=torch.uint8)
        except (RuntimeError, TypeError):  # more than memory has, or than a size can be
            return self._fetch_whole(key)
        data[:PIECE_BYTES] = first
        missing, where = split_pieces(layers, PIECE_BYTES), self._where(key)
        rest = StreamingEntry(data, missing, partial(self._read, key), self._bandwidth, on_abort, where)
        entry = parse_entry(data, where, lambda reason: on_abort(), rest)
        check_entry(entry, key, None, where)
        return FetchedEntry(entry, rest)

    def _layer_ranges(self, key: str, beginning: Tensor) -> LayerRanges | None:
        """Return where the layers lie; None if the beginning does not tell, so that only the whole entry can."""
        try:
            return read_layer_ranges(beginning, self._where(key))
        except DamagedEntry:
            return None

    def _read(self, key: str, ranges: Sequence[ByteRange]) -> Sequence[Blob] | None:
        size = sum(end - begin for begin, end in ranges)
        return self._bandwidth.measure(lambda: self._tier.get_ranges(key, ranges), size)

    def _where(self, key: str) -> str:
        return f"entry {key} in {self._tier.location}"


class _Attempt:
    """Identifies one fetch of a key."""

    aborted = False


@dataclass(slots=True)
class _Fetch:
    """An entry that is being read or stored, and whether a request still wants it."""

    fetched: FetchedEntry
    is_wanted: IsWanted
    attempt: _Attempt


class Fetcher:
    """Fetches from one shared tier; safe to use from several threads.

    Args:
        reader: reads the tier's entries.
        held: returns an entry that this machine holds in memory alone, so that it need not be fetched again.
        store: called in the background with an entry that has been read completely; its layers may not be verified yet.

    Attributes:
        loader: runs the fetches.
    """

    def __init__(
        self,
        reader: RemoteReader,
        held: Callable[[str], FetchedEntry | None],
        store: Callable[[FetchedEntry], None],
    ) -> None:
        self._reader = reader
        self._held = held
        self.store = store
        self.loader: Loader[FetchedEntry | None] = Loader()
        self._fetches: dict[str, _Fetch] = {}
        self._aborted: set[str] = set()
        self._guard = threading.Lock()

    @property
    def pending(self) -> int:
        return len(self._fetches)

    def prefetch(self, key: EntryKey, lease: Lease, *, inline: bool = False) -> None:
        """Begin to fetch an entry, for as long as the lease lasts; `inline` as in `Loader.start`."""
        lease.on_close(partial(self.loader.cancel, [self._load(key, inline, whole=False)]))

    def get(
        self, keys: Sequence[EntryKey], lease: Lease | None, *, inline: bool = False
    ) -> list[FetchedEntry | None]:
        """Return each entry that is there: large KV from its beginning on; without a lease whole and verified."""
        if lease is None:
            return self._get_whole(keys, inline)
        holds = [self._load(key, inline, whole=False) for key in keys]
        try:
            found = self.loader.wait([self._load(key, inline, whole=False) for key in keys])
        except BaseException:
            self.loader.cancel(holds)
            raise
        for hold, fetched in zip(holds, found, strict=True):
            if fetched is None or fetched.whole:  # other requests should ask the tier again
                self.loader.cancel([hold])
            else:
                lease.on_close(partial(self.loader.cancel, [hold]))
        return found

    def close(self) -> None:
        """Start nothing more; wait until active reads have ended and whole entries are stored."""
        with self._guard:
            self._fetches = {key: fetch for key, fetch in self._fetches.items() if fetch.fetched.whole}
        self.loader.close()
        with self._guard:
            self._fetches.clear()

    def _get_whole(self, keys: Sequence[EntryKey], inline: bool) -> list[FetchedEntry | None]:
        """Return entries with every layer read and verified; they are wanted until then."""
        holds = [self._load(key, inline, whole=True) for key in keys]
        try:
            found = self.loader.wait([self._load(key, inline, whole=True) for key in keys])
            return list(map(self._completed, keys, found))
        finally:
            self.loader.cancel(holds)

    def _completed(self, key: EntryKey, fetched: FetchedEntry | None) -> FetchedEntry | None:
        """Read and verify the remaining layers: another request may have begun the fetch without them."""
        while fetched is not None:
            try:
                verify_content(fetched.parsed.content)
                break
            except DamagedEntry:
                (fetched,) = self.loader.wait([self._load(key, inline=True, whole=True)])
        return fetched

    def _load(self, key: EntryKey, inline: bool, whole: bool) -> Load[FetchedEntry | None]:
        return self.loader.start(key.digest, partial(self._fetch, key, whole), inline=inline)

    def _fetch(self, key: EntryKey, whole: bool, is_wanted: IsWanted) -> FetchedEntry | None:
        """Return an entry from an active fetch, from memory or from the tier, and have its rest read in the background."""
        if not is_wanted():
            raise AbandonedError
        fetched = self._join(key.digest, is_wanted)
        if fetched is None:
            attempt = _Attempt()
            fetched = self._held(key.digest) or self._fetch_from_tier(key, whole, attempt)
            # An entry that no request wants any more is not stored either.
            if fetched is not None and is_wanted():
                with self._guard:
                    self._fetches[key.digest] = _Fetch(fetched, is_wanted, attempt)
                self.loader.run_later(partial(self._continue, key.digest, attempt))
        return fetched

    def _join(self, key: str, is_wanted: IsWanted) -> FetchedEntry | None:
        with self._guard:
            fetch = self._fetches.get(key)
            if fetch is None:
                return None
            fetch.is_wanted = is_wanted
            return fetch.fetched

    def _fetch_from_tier(self, key: EntryKey, whole: bool, attempt: _Attempt) -> FetchedEntry | None:
        with self._guard:
            whole = whole or key.digest in self._aborted
        fetched = self._reader.fetch(key, partial(self._abort, key.digest, attempt), whole=whole)
        if fetched is not None and fetched.whole:
            with self._guard:
                self._aborted.discard(key.digest)
        return fetched

    def _abort(self, key: str, attempt: _Attempt) -> None:
        """End a fetch that failed: later requests must not get what it has read.

        Each thread that meets the damage says so, the last one perhaps while the entry is fetched again: only the first counts.
        """
        with self._guard:
            if attempt.aborted:
                return
            attempt.aborted = True
            self._aborted.add(key)
        self._end(key, attempt)
        self.loader.discard_result(key)

    def _continue(self, key: str, attempt: _Attempt) -> None:
        """Read the next piece of an entry, or store the entry when it is whole."""
        fetched = self._active(key, attempt)
        if fetched is None:
            return
        more = False
        try:
            more = fetched.rest is not None and not fetched.rest.advance()
            if not more:
                self.store(fetched)
        except DamagedEntry:
            pass  # the fetch is aborted, and a request that needs the layer learns of it
        finally:
            if more:
                self.loader.run_later(partial(self._continue, key, attempt))
            else:
                self._end(key, attempt)

    def _active(self, key: str, attempt: _Attempt) -> FetchedEntry | None:
        """Return the entry of this fetch, unless it was aborted; end the fetch if it is neither whole nor wanted."""
        with self._guard:
            fetch = self._fetches.get(key)
            if fetch is None or fetch.attempt is not attempt:
                return None
            if fetch.fetched.whole or fetch.is_wanted():
                return fetch.fetched
            del self._fetches[key]
        return None

    def _end(self, key: str, attempt: _Attempt) -> None:
        with self._guard:
            if key in self._fetches and self._fetches[key].attempt is attempt:
                del self._fetches[key]
