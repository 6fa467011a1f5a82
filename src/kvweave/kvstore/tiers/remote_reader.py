"""Reads entries of the shared tier: small ones whole and verified, large KV from its beginning on while the rest is read."""

import logging
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

        Damage found by then is deleted, counted and logged.

        Args:
            key: which one.
            on_abort: called before DamagedEntry is raised later on, over a layer that is altered or cannot be read. Nothing
                else is done about it: another machine may have replaced the entry, or the server not answer. Fetching the
                entry whole tells which.
            whole: read all of it now.
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
