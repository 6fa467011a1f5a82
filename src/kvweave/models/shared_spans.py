"""Stored KV that several requests read in place: placed once, in memory once, for as long as one of them runs.

A request over shared spans owns only its own rows: the recomputed ones, the question and the answer. It skips the stale rows
that it replaces (FusionRAG §4.3, Q-Sparse-Attn: shared and exclusive pages). A packed pass attends to both in place. Any
other pass gets a layer's rows copied in prompt order, and drops the copy after the layer.
"""

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvweave.models.fused_cache import FusedCache, FusedCacheLayer, PlacedSpan, SharedLayerState
from kvweave.models.rotary import PlacedRotation
from kvweave.ops.attention import AttentionInput, KVRows, merge_spans
from kvweave.types import ChunkKV

FIRST_ROWS: Final = 64
"""Rows of a request that a layer has room for at first."""


class SharedSpan:
    """Stored KV at prompt positions `positions` (S,), with its keys rotated to where it is placed.

    A layer is read, verified and rotated when it is first used, once for all requests. Read only. `angles` are those of a
    run of positions in which the span's begin at index `first`.
    """

    def __init__(self, span: PlacedSpan, angles: PlacedRotation, first: int, device: torch.device) -> None:
        self.positions = torch.arange(span.start, span.end, device=device)
        self.source: tuple[ChunkKV, PlacedRotation] | None = span.kv, angles
        self._first, self._device = first, device
        self._count = int(span.kv.data.shape[0])
        self._layers: dict[int, KVRows] = {}
        self._guard = threading.Lock()

    def layer(self, index: int) -> KVRows:
        """Return a layer's keys and values (1, G, S, D). Raises DamagedEntry if they are not what was stored."""
        with self._guard:
            if index not in self._layers:
                assert self.source is not None
                kv, angles = self.source
                stored = kv.layer(index).to(self._device)  # (2, G, S, D)
                keys = angles.rotate(index, stored[:1], self._first)
                self._layers[index] = KVRows(keys, stored[1:], self.positions)
                if len(self._layers) == self._count:
                    self.source = None  # every layer is placed
            return self._layers[index]

    @property
    def bytes(self) -> int:
        """The memory that its placed layers take."""
        with self._guard:
            return sum(rows.keys.nbytes + rows.values.nbytes for rows in self._layers.values())


def can_share(spans: Sequence[PlacedSpan]) -> bool:
    """Whether requests can read these spans in place: each is a whole stored entry, at consecutive positions."""
    return bool(spans) and all(span.kv.entry is not None and span.offsets is None for span in spans)


class SpanPool:
    """The shared spans of the requests that run now. A span is freed with its last request. Safe to use from several threads."""

    def __init__(self) -> None:
        self._spans: weakref.WeakValueDictionary[tuple[object, ...], SharedSpan] = (
            weakref.WeakValueDictionary()
        )
        self._guard = threading.Lock()

    def share(
        self, spans: Sequence[PlacedSpan], angles: PlacedRotation, device: torch.device
    ) -> list[SharedSpan]:
        """Return the shared spans of stored entries that are placed like `spans`, which `can_share`.

        `angles` are those of all positions from the first span's start to the last one's end.
        """
        with self._guard:
            return [self._shared(span, angles, span.start - spans[0].start, device) for span in spans]

    def _shared(
        self, span: PlacedSpan, angles: PlacedRotation, first: int, device: torch.device
    ) -> SharedSpan:
        key = (span.kv.entry, span.start, span.rope_start)
        found = self._spans.get(key)
        if found is None:
            found = self._spans[key] = SharedSpan(span, angles, first, device)
        return found

    @property
    def bytes(self) -> int:
        """The memory that all spans take."""
        with self._guard:
            spans = list(self._spans.values())
        return sum(span.bytes for span in spans)


class SharedSpanCache(FusedCache):
    """A request's KV over shared spans; see FusedCache.

    `shared` are the `spans`, shared with other requests; `angles` are for passes that need KV of their own.
    """

    def __init__(
        self,
        layers: int,
        length: int,
        spans: tuple[PlacedSpan, ...],
        shared: Sequence[SharedSpan],
        angles: PlacedRotation,
        positions: Tensor,
    ) -> None:
        self._spans: tuple[SharedSpan, ...] = tuple(shared)
        self._own = OwnRows(length, positions.device)
        super().__init__(layers, length, spans, angles, positions)
        self._spans = ()  # the layers hold them, until they own all of their KV

    def _new_layer(self, index: int) -> FusedCacheLayer:
        return SharedSpanLayer(self._shared, index, self._spans, self._own)

    def load(self, layer_s: float | None) -> None:
        """For None, load, rotate and place all layers, so that no pass has to; otherwise as FusedCache does."""
        if layer_s is not None:
            super().load(layer_s)
            return
        began = time.perf_counter()
        for index, layer in enumerate(self.layers):
            for span in layer.spans:
                span.layer(index)
        self._shared.place_s += time.perf_counter() - began

    def truncate_prompt(self, tokens: int) -> None:
        """Continue from the first `tokens` positions, on KV of the request's own."""
        for layer in self.layers:
            layer.unshare()
        super().truncate_prompt(tokens)


class OwnRows:
    """Where a request's own prompt rows are in the buffers of its layers: the same at every layer.

    `places` (N,) has the row of the buffers for a prompt position, −1 for none; `positions` (rows,) the other way round.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.places = torch.full((length,), -1, device=device)
        self.positions = torch.empty(0, dtype=torch.long, device=device)

    def take(self, rows: Tensor) -> Tensor:
        """Return the places (T,) of prompt positions (T,), new ones for positions that have none."""
        new = rows[self.places[rows] < 0]
        if new.numel():
            count = self.positions.numel()
            self.places[new] = torch.arange(count, count + new.numel(), device=rows.device)
            self.positions = torch.cat([self.positions, new])
        return self.places[rows]


class SharedSpanLayer(FusedCacheLayer):
    """One layer over shared spans: buffers `keys`, `values` (1, G, capacity, D) hold the request's own rows alone.

    Appended rows follow those of the prompt. A prompt row that an earlier pass wrote in other layers only holds here what the
    shared span has, so that all layers have the same own rows.
    """

    def __init__(
        self, shared: SharedLayerState, index: int, spans: tuple[SharedSpan, ...], own: OwnRows
    ) -> None:
        super().__init__(shared, index)
        self.spans, self.own = spans, own
        self._unshared = False
        self._written = 0  # prompt rows that hold something

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new rows (1, G, T, D) and return a copy of all valid keys and values in prompt order."""
        if self._unshared or key_states.shape[0] != 1:
            self.unshare()
            return super().update(key_states, value_states, *args, **kwargs)
        self.write(key_states, value_states)
        return self._merged()

    def write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write new rows (1, G, T, D)."""
        shared = self._shared
        self._make_buffers(key_states, value_states)
        if shared.rows is None:
            start = self.own.positions.numel() + self.appended
            self.appended += key_states.shape[2]
            places = torch.arange(start, start + key_states.shape[2], device=key_states.device)
        else:
            if shared.capture is not None:
                shared.capture.record(self._index, shared.rows, key_states, value_states)
            places = self.own.take(shared.rows)
        self._fill()
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)

    def attention_input(self) -> AttentionInput:
        """Return the shared spans and the request's own rows, which replace shared ones at their positions."""
        self._fill()
        prompt = self.own.positions
        appended = torch.arange(self._shared.length, self._length, device=prompt.device)
        used = prompt.numel() + self.appended
        own = KVRows(self.keys[:, :, :used], self.values[:, :, :used], torch.cat([prompt, appended]))
        shared = tuple(span.layer(self._index) for span in self.spans)
        return AttentionInput(shared, own, prompt)

    def prompt_kv(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's keys and values of all prompt positions; see `FusedCache.layer_kv`."""
        if self._unshared:
            return super().prompt_kv(like)
        self._make_buffers(like, like)
        keys, values = self._merged()
        return keys[:, :, : self._shared.length], values[:, :, : self._shared.length]

    def pop_kv(self) -> tuple[Tensor, Tensor] | None:
        """Return all keys and values (G, N, D) and drop the buffers; None if nothing was written."""
        self.unshare()
        return super().pop_kv()

    def unshare(self) -> None:
        """Copy the shared spans, so that the layer owns all of its KV from now on."""
        if self._unshared:
            return
        if self.is_initialized:
            self.keys, self.values = self._merged()
        self._unshared, self.spans = True, ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as beam search needs; on KV of the request's own."""
        self.unshare()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the chosen sequences, on KV of the request's own."""
        self.unshare()
        super().batch_select_indices(indices)

    @property
    def _length(self) -> int:
        return self._shared.length + self.appended

    def _make_buffers(self, key_states: Tensor, value_states: Tensor) -> None:
        if self._unshared:
            super()._make_buffers(key_states, value_states)
        elif not self.is_initialized:
            shape = (1, key_states.shape[1], 0, key_states.shape[3])
            self.keys, self.values = key_states.new_empty(shape), value_states.new_empty(shape)
            self.lazy_initialization(key_states, value_states)

    def _fill(self) -> None:
        """Make room for all own rows; those that nothing has written here get what the shared spans have, or zeros."""
        prompt = self.own.positions
        used = prompt.numel() + self.appended
        if used > self.keys.shape[2]:
            grown = max(FIRST_ROWS, used + used // 2) - self.keys.shape[2]
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, grown))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, grown))
        new = prompt[self._written :]
        if not new.numel():
            return
        self.keys[:, :, self._written : prompt.numel()] = 0
        self.values[:, :, self._written : prompt.numel()] = 0
        for span in self.spans:
            first, end = int(span.positions[0]), int(span.positions[-1]) + 1
            inside = ((new >= first) & (new < end)).nonzero()[:, 0]
            if inside.numel():
                stored, rows = span.layer(self._index), new[inside] - first
                self.keys[:, :, self._written + inside] = stored.keys[:, :, rows]
                self.values[:, :, self._written + inside] = stored.values[:, :, rows]
        self._written = prompt.numel()

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Return new keys and values of all positions held, (1, G, N, D)."""
        return merge_spans(self.attention_input(), self._length)
