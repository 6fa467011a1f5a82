"""The KV of one text, offloaded to disk, as a transformers cache.

A model continues from it by our own steps or by an ordinary `generate`.
Its KV in memory stays within `resident_bytes`: windows, buffers and the index of clusters come first, frames for clusters get the rest.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kvweave.decode.clusters.outlined import outlined_or_whole
from kvweave.decode.layer import OffloadedLayer
from kvweave.decode.settings import OffloadSettings
from kvweave.decode.strategy import (
    CacheHooks,
    SharedState,
    SinkAttention,
    Strategy,
    build_shared_state,
    token_budget,
)
from kvweave.errors import InvalidRequest, StoreError
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.cache_base import AppendableCache
from kvweave.models.support import Geometry
from kvweave.plugins import more_in_lab, plugins

_BLOCK_ROWS = 256  # rows of a turn that share what is retrieved


OUTLINE = "outline"
"""The name of kvweave's own strategy."""


def strategy_named(name: str) -> Strategy:
    """Return kvweave's strategy, or one that another package adds through `kvweave.strategies`; raise InvalidRequest."""
    if name == OUTLINE:
        return Strategy(outlined_or_whole)
    others = plugins("kvweave.strategies")
    if name not in others:
        more, known = more_in_lab("kvweave.strategies"), ", ".join((OUTLINE, *sorted(others)))
        raise InvalidRequest(f"there is no decoding strategy {name!r}; choose one of {known}{more}")
    strategy: Strategy = others[name].load()
    return strategy


class OffloadedCache(AppendableCache):
    """KV of one text, on disk and in memory. Close it: its file has no name and is deleted with it.

    `positions` are the rotary positions (N,) of the prompt it will be filled with, empty for a text that starts with its first
    pass; `path` is that of its file, for a text that outlives the process.

    Raises:
        InvalidRequest: the settings are invalid.
        StoreError: a file cannot be created.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: OffloadSettings,
        positions: Tensor | None = None,
        path: Path | None = None,
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self._failure: str | None = None  # a message: a traceback would keep this cache alive
        self._on_next_change: Callable[[], None] | None = None
        strategy = strategy_named(settings.strategy)
        # For callbacks: with cycles, frames would outlive the last reference to the cache.
        weak = cast(OffloadedCache, weakref.proxy(self))
        self.shared = build_shared_state(
            geometry, settings, strategy, path, lambda: weak.limit.reclaim_frames()
        )
        self.counts = self.shared.counts
        try:
            self.limit = MemoryLimit(self.shared, geometry.layers, geometry.kv_heads)
            hooks = [
                CacheHooks(
                    partial(OffloadedCache._reserve_memory, weak, layer),
                    partial(OffloadedCache._has_room, weak, layer),
                    partial(OffloadedCache._prefetch_after, weak, layer),
                )
                for layer in range(geometry.layers)
            ]
            layers = [
                OffloadedLayer(
                    settings.sinks,
                    strategy.retriever(layer, self.shared, own),
                    lambda stored: token_budget(settings, stored),
                    own,
                )
                for layer, own in enumerate(hooks)
            ]
            where = torch.empty(0, dtype=torch.long) if positions is None else positions
            super().__init__(layers, where.to(geometry.device))
            self.continuation = partial(OffloadedPlan, weak, dtype=geometry.dtype)
            self._check_room(*range(geometry.layers))
        except BaseException:
            self.close()
            raise

    def fill(
        self, layer: int, keys: Tensor, values: Tensor, queries: Tensor | None, sliding_window: int | None
    ) -> None:
        """Store one layer of a prompt, keys and values (G, N, D); see `OffloadedLayer.fill`. Raises as `attend`."""
        with self._usable():
            self.limit.layers_begun = max(self.limit.layers_begun, layer + 1)
            self.layers[layer].fill(keys, values, queries, sliding_window)
            self._check_room(layer)

    def before_layer(self, layer: int) -> None:
        """Start reading what the layer selects by while the model projects its query."""
        with self._usable():
            if self.layers[layer].sliding_window is None:
                self.layers[layer].retriever.prefetch_index()

    def attend(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """Return one layer's attention output (1, H, T, D) for new rows (T,) that its update has appended.

        Raises StoreError, StoreFull or InvalidRequest (not enough memory); the cache is unusable afterwards.
        """
        with self._usable():
            self._start_layer(call.layer)
            layer: OffloadedLayer = self.layers[call.layer]
            output, attended = layer.attend(call, rows)
            self._finish_layer(call.layer, rows.numel(), attended)
        return output

    def attend_turn(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """Return one layer's attention output (1, H, T, D) for rows (T,) of a prompt that follows this text.

        `call` has the prompt's keys and values; nothing is appended. Blocks of rows share what is retrieved. Raises as
        `attend`.
        """
        outputs = []
        with self._usable():
            self._start_layer(call.layer)
            layer: OffloadedLayer = self.layers[call.layer]
            blocks = zip(call.query.split(_BLOCK_ROWS, dim=2), rows.split(_BLOCK_ROWS), strict=True)
            for query, block in blocks:
                output, attended = layer.attend_turn(replace(call, query=query), block)
                self._finish_layer(call.layer, block.numel(), attended)
                outputs.append(output)
        return torch.cat(outputs, dim=2)

    def append(self, layer: int, keys: Tensor, values: Tensor, sliding_window: int | None) -> None:
        """Append one layer of that prompt, keys and values (G, N, D). Raises as `attend`."""
        with self._usable():
            self.layers[layer].append(keys, values, sliding_window)
            self._check_room(layer)

    @property
    def resident_bytes(self) -> int:
        return self.limit.resident_bytes

    @property
    def usable(self) -> bool:
        """Whether nothing has failed so far: after a failure the cache cannot be continued."""
        return self._failure is None

    def on_next_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, before the next pass changes anything."""
        self._on_next_change = callback

    def flush(self) -> dict[str, object]:
        """Sync everything to disk; return what is in memory, for `ClusterStore.restore_resident`.

        Raises StoreError and StoreFull; the cache is unusable afterwards.
        """
        with self._usable():
            resident = self.shared.store.resident_state()
            self.shared.store.flush()
        return resident

    def measure(self, *layers: int) -> None:
        """Record the memory that these layers take now."""
        for index in layers:
            layer: OffloadedLayer = self.layers[index]
            self.limit.layer_bytes[index] = layer.recent.resident_bytes + layer.retriever.resident_bytes

    def close(self) -> None:
        """Wait for reads in flight and close the file; closing twice is fine. The cache is unusable afterwards."""
        self._failure = self._failure or "it was closed"
        self.shared.store.close()
        self.shared.index.close()

    def __enter__(self) -> "OffloadedCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise StoreError after a failure: part of a pass may have been stored."""
        if self._failure is not None:
            raise StoreError(f"this text's KV cannot be used any more: {self._failure}")
        try:
            yield
        except BaseException as error:  # an interruption too
            self._failure = str(error) or f"it was stopped by {type(error).__name__}"
            raise

    def _start_layer(self, layer: int) -> None:
        if layer == 0:
            if self._on_next_change is not None:
                self._on_next_change()
                self._on_next_change = None
            self.shared.store.page_cache.next_row()

    def _finish_layer(self, layer: int, rows: int, attended: int) -> None:
        self.counts.rows += rows * (layer == 0)
        self.counts.attended += attended
        self.measure(layer)
        self.limit.enforce()

    def _check_room(self, *layers: int) -> None:
        """Enforce the limit after these layers have grown, and check that the steps that follow have room."""
        self.measure(*layers)
        self.limit.enforce()
        self.limit.reclaim_frames()
        retrievers = [layer.retriever for layer in self.layers]
        if not all(isinstance(retriever, SinkAttention) for retriever in retrievers):
            # One layer grows after another, and holds what it had until it is copied.
            largest = max(retriever.resident_bytes for retriever in retrievers)
            growth_bytes = sum(retriever.growth_bytes for retriever in retrievers)
            self.limit.check_room(growth_bytes + largest * bool(growth_bytes))

    def _reserve_memory(self, layer: int, more_bytes: int) -> None:
        """Make room for `more_bytes` that a layer is about to allocate."""
        if more_bytes:
            with self._usable():
                self.measure(layer)
                self.limit.enforce(more_bytes)

    def _has_room(self, layer: int, more_bytes: int) -> bool:
        self.measure(layer)
        return self.limit.has_room(more_bytes)

    def _prefetch_after(self, layer: int) -> None:
        """Start reading what the next layer that retrieves will probably need, while this one attends."""
        for following in (*self.layers[layer + 1 :], *self.layers[:layer]):
            if following.sliding_window is None:
                following.retriever.prefetch()
                return


class OffloadedPlan(RowPlan):
    """New rows (T,) attend to what each layer of `cache` retrieves."""

    def __init__(self, cache: OffloadedCache, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self.cache = cache

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); `call` has the rows' own keys and values."""
        return self.cache.attend(call, self.rows)


class MemoryLimit:
    """Accounts for the memory of a cache of `kv_heads` heads per layer, and enforces its limit, if it has one.

    When windows, buffers and indexes grow, frames are withdrawn from the page cache; when they shrink, frames are restored.

    Attributes:
        layer_bytes: of each layer, without frames and the shared index.
        layers_begun: how many layers have been filled, or are being filled.
    """

    def __init__(self, shared: SharedState, layers: int, kv_heads: int) -> None:
        self._shared = shared
        self._limit = shared.settings.resident_bytes
        self._frames = shared.store.page_cache.frames
        self.layer_bytes = [0] * layers
        self.layers_begun = 0
        self._kv_heads = kv_heads
        self._reserved_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """KV in memory now, with all buffers that hold it."""
        return self.bytes_without_frames() + self._frames.touched_bytes

    def has_room(self, more_bytes: int) -> bool:
        """Return whether `enforce` can make room for `more_bytes` while no cluster must stay in memory."""
        return self._limit is None or self.bytes_without_frames() + more_bytes <= self._limit

    def enforce(self, more_bytes: int = 0) -> None:
        """Withdraw the frames that windows and indexes need, with `more_bytes` that are about to be allocated.

        Raises InvalidRequest if there are not enough frames.
        """
        self._shared.counts.record_resident(self.resident_bytes)
        self._reserved_bytes = more_bytes
        if self._limit is None:
            return
        other_bytes = self.bytes_without_frames() + more_bytes
        allowed = (self._limit - other_bytes) // self._frames.page_bytes
        if allowed < 0:
            layers, begun = len(self.layer_bytes), self.layers_begun or len(self.layer_bytes)
            others = (sum(self.layer_bytes) + more_bytes) * (layers - begun) // begun
            raise InvalidRequest(
                f"resident_bytes is {self._limit}; windows, buffers and the index of clusters alone take about "
                f"{other_bytes + others}: allow {other_bytes + others - self._limit} bytes more, and some for clusters"
            )
        surplus = self._frames.count - allowed
        if surplus > 0:
            self._shared.store.page_cache.ensure_free(surplus)
            self._frames.withdraw(surplus)

    def reclaim_frames(self) -> None:
        """Restore withdrawn frames that windows and indexes no longer need."""
        if self._limit is None or not self._frames.withdrawn:
            return
        free_bytes = self._limit - self.bytes_without_frames() - self._reserved_bytes
        unused = free_bytes // self._frames.page_bytes - self._frames.count
        self._frames.restore(max(0, min(unused, self._frames.withdrawn)))

    def check_room(self, growth_bytes: int) -> None:
        """Raise InvalidRequest if the limit leaves too few frames for steps in which layers grow by so much."""
        if self._limit is not None:
            self._shared.store.check_room(growth_bytes + self._shared.index.growth_bytes)

    def bytes_without_frames(self) -> int:
        """Return the resident bytes of everything but page frames."""
        shared = self._shared
        return (
            sum(self.layer_bytes)
            + shared.index.resident_bytes
            + shared.store.pages.buffer_bytes
            + self.workspace_bytes
        )

    @property
    def workspace_bytes(self) -> int:
        """Memory that attention to a portion of clusters takes."""
        portion_pages = self._shared.portion_pages * self._kv_heads
        return portion_pages * self._shared.store.entry_format.workspace_bytes
