"""Keeps the KV of an offloaded cache within `resident_bytes`.

Windows, buffers and centroids come first; frames for clusters get the rest. When the former grow, frames are withdrawn
from the page cache; when they shrink, frames are restored.
"""

import weakref
from functools import partial

from kvweave.decode.clusters.centroids import SPARE_COLUMNS
from kvweave.decode.shared_state import SharedState
from kvweave.errors import InvalidRequest


class MemoryLimit:
    """Accounts for the memory of a cache of `kv_heads` heads per layer, and enforces its limit, if it has one."""

    def __init__(self, shared: SharedState, layers: int, kv_heads: int) -> None:
        self._shared = shared
        self._limit = shared.settings.resident_bytes
        self._frames = shared.store.page_cache.frames
        self._layer_bytes = [0] * layers  # of each layer, without frames and centroids
        self._kv_heads = kv_heads
        self._reserved_bytes = 0
        # A weak reference: a cycle would keep the frames alive.
        shared.store.page_cache.reclaim_frames = partial(MemoryLimit.reclaim_frames, weakref.proxy(self))

    @property
    def resident_bytes(self) -> int:
        """KV in memory now, with all buffers that hold it."""
        return self._bytes_without_frames() + self._frames.touched_bytes

    def record_layer(self, layer: int, resident_bytes: int) -> None:
        """Record what a layer holds now, without frames and centroids."""
        self._layer_bytes[layer] = resident_bytes

    def has_room(self, more_bytes: int) -> bool:
        """Return whether `enforce` can make room for `more_bytes` while no cluster must stay in memory."""
        return self._limit is None or self._bytes_without_frames() + more_bytes <= self._limit

    def enforce(self, more_bytes: int = 0) -> None:
        """Withdraw the frames that windows and centroids need, with `more_bytes` that are about to be allocated.

        Raises InvalidRequest if there are not enough frames.
        """
        self._shared.counts.record_resident(self.resident_bytes)
        self._reserved_bytes = more_bytes
        if self._limit is None:
            return
        other_bytes = self._bytes_without_frames() + more_bytes
        allowed = (self._limit - other_bytes) // self._frames.page_bytes
        if allowed < 0:
            raise InvalidRequest(
                f"resident_bytes is {self._limit}; windows, buffers and centroids alone take {other_bytes}: allow "
                f"{other_bytes - self._limit} bytes more, and some for clusters"
            )
        surplus = self._frames.count - allowed
        if surplus > 0:
            self._shared.store.page_cache.ensure_free(surplus)
            self._frames.withdraw(surplus)

    def reclaim_frames(self) -> None:
        """Restore withdrawn frames that windows and centroids no longer need."""
        if self._limit is None or not self._frames.withdrawn:
            return
        free_bytes = self._limit - self._bytes_without_frames() - self._reserved_bytes
        unused = free_bytes // self._frames.page_bytes - self._frames.count
        self._frames.restore(max(0, min(unused, self._frames.withdrawn)))

    def check_room(self) -> None:
        """Raise InvalidRequest if the limit leaves too few frames for the steps that follow."""
        if self._shared.settings.strategy in ("dense", "window"):
            return
        growth_bytes = self._shared.centroids.growth_bytes
        layers = range(len(self._layer_bytes))
        self._shared.store.check_room(max(growth_bytes(layer, SPARE_COLUMNS + 1, 2) for layer in layers))

    def _bytes_without_frames(self) -> int:
        shared = self._shared
        return (
            sum(self._layer_bytes)
            + shared.centroids.resident_bytes
            + shared.store.pages.buffer_bytes
            + self._workspace_bytes
        )

    @property
    def _workspace_bytes(self) -> int:
        """Memory that attention to a portion of clusters takes, and the copies that a split works on."""
        entry_format = self._shared.store.entry_format
        portion_pages = self._shared.portion_pages * self._kv_heads
        numbers = 2 * entry_format.page_entries * entry_format.width
        max_pages = entry_format.page_count(self._shared.settings.clusters.max_entries)
        split_bytes = max_pages * (entry_format.page_bytes + 4 * numbers)
        return portion_pages * entry_format.workspace_bytes + split_bytes
