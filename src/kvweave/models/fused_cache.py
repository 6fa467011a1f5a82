"""The KV of one request, as a transformers Cache into which a pass writes chosen rows in place.

A fused cache starts as a list of placed spans: stored chunk KV, unrotated and read-only, each with its prompt position.
At a layer's first update the spans are copied into buffers in prompt order and rotated to their positions. Every pass
writes its rows in place, over stale ones too. Stored tensors are never written to.

After prefill the cache switches to append mode, and any transformers `generate` continues on it. Instead it can stream:
it then holds one layer at a time and writes each to a sink when the pass starts the next one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvweave.errors import InvalidRequest
from kvweave.models.cache_base import AppendableCache, LayerSink
from kvweave.models.rotary import PlacedRotation, RowCapture
from kvweave.types import ChunkKV

SPARE_TOKENS = 64  # room for the first generated tokens before a layer has to grow
ROTATED_TOKENS = 4096
"""Tokens rotated at a time, over all chunks. A rotation is many small operations, too slow chunk by chunk, and copies its
input, too much memory for a whole layer."""


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Stored KV at prompt positions `start` … `start + kv.tokens`, rotated as if it started at `rope_start`.

    `offsets` (tokens,) are the rotary positions relative to `rope_start` where tokens of the chunk are left out.
    """

    kv: ChunkKV
    start: int
    rope_start: int
    offsets: Tensor | None = None

    @property
    def end(self) -> int:
        """The prompt position after its last token."""
        return self.start + self.kv.tokens

    @property
    def rope_positions(self) -> Tensor:
        """The rotary position of each token, (tokens,)."""
        offsets = torch.arange(self.kv.tokens) if self.offsets is None else self.offsets
        return self.rope_start + offsets


def rope_positions(spans: Sequence[PlacedSpan]) -> Tensor:
    """Return the rotary positions from the first span's start to the last span's end, (S,); 0 between spans.

    `spans` are in prompt order. Raises InvalidRequest if two overlap.
    """
    if not spans:
        return torch.empty(0, dtype=torch.long)
    for before, after in pairwise(spans):
        if after.start < before.end:
            raise InvalidRequest(
                f"stored KV is placed at positions {before.start} to {before.end - 1} and again at {after.start}; "
                "place each span after the one before"
            )
    first = spans[0].start
    positions = torch.zeros(spans[-1].end - first, dtype=torch.long)
    for span in spans:
        positions[span.start - first : span.end - first] = span.rope_positions
    return positions


def check_positions(positions: Tensor, length: int) -> None:
    """Raise InvalidRequest unless there is one rotary position for each token, and the last is the largest."""
    if positions.shape != (length,):
        raise InvalidRequest(
            f"positions have shape {tuple(positions.shape)} for a prompt of {length} tokens; one each is needed"
        )
    if length and int(positions[-1]) != int(positions.max()):
        raise InvalidRequest(
            f"the last token is at rotary position {int(positions[-1])}, before {int(positions.max())}; the question "
            "must come after everything else, since the answer follows it"
        )


class FusedCache(AppendableCache):
    """A request's KV over a prompt of `length` tokens.

    Args:
        layers: number of layers.
        length: prompt tokens.
        spans: stored KV in prompt order, without overlaps. Positions outside them must be computed by a pass before any
            row attends to them.
        angles: those of all positions from the first span's start to the last one's end.
        positions: rotary positions of all prompt tokens (N,), the last one the largest.
    """

    def __init__(
        self,
        layers: int,
        length: int,
        spans: tuple[PlacedSpan, ...],
        angles: PlacedRotation,
        positions: Tensor,
    ) -> None:
        self._shared = SharedLayerState(layers, length, spans, angles)
        super().__init__([self._new_layer(index) for index in range(layers)], positions)

    def _new_layer(self, index: int) -> "FusedCacheLayer":
        return FusedCacheLayer(self._shared, index)

    @property
    def length(self) -> int:
        """Prompt positions."""
        return self._shared.length

    @property
    def spans(self) -> tuple[PlacedSpan, ...]:
        """The placed spans; empty once every layer has its own copy."""
        return self._shared.spans

    @property
    def place_s(self) -> float:
        """Seconds spent on loading, copying and rotating stored KV so far."""
        return self._shared.place_s

    @property
    def capture(self) -> RowCapture | None:
        """Collects the unrotated K and the V of the rows that a pass computes; set before the pass."""
        return self._shared.capture

    @capture.setter
    def capture(self, capture: RowCapture | None) -> None:
        self._shared.capture = capture

    @property
    def sink(self) -> LayerSink | None:
        """The sink that layers are written to; None if the cache holds them itself."""
        return self._shared.sink

    def load(self, layer_s: float | None) -> None:
        """Load the first layer of every span, and the other layers too if one takes longer than `layer_s` to load, or for None.

        Where a layer loads faster than it computes, a pass can start while the others are loading. Elsewhere they are better
        loaded before the pass occupies the model, which other requests can use meanwhile (FusionRAG §4.2). The loading
        time of a layer is measured on the first one; over a network, on what has arrived so far.
        Raises DamagedEntry if a layer differs from what was stored.
        """
        began = time.perf_counter()
        for span in self.spans:
            span.kv.load(0)
        wait_s = sum(span.kv.layer_wait_s for span in self.spans)
        if layer_s is None or max(time.perf_counter() - began, wait_s) > layer_s:
            for span in self.spans:
                for layer in range(1, len(self.layers)):
                    span.kv.load(layer)
        self._shared.place_s += time.perf_counter() - began

    @contextmanager
    def writing(self, rows: Tensor) -> Iterator[None]:
        """For the length of one pass, write updates to these prompt positions (T,)."""
        shared = self._shared
        shared.rows = rows
        try:
            yield
            self.before_layer(len(self.layers))
        finally:
            shared.rows = None
            if shared.sink is not None:
                for layer in self.layers:
                    layer.pop_kv()

    def write_only(self, rows: Tensor) -> None:
        """For the rest of the pass write only these rows (T,), a subset."""
        self._shared.rows = rows

    def stream_to(self, sink: LayerSink) -> None:
        """From the next pass on hold one layer at a time, and write each to `sink` when the pass starts the next.

        Every pass starts from the placed spans, without what earlier passes wrote: whatever must last has to be
        computed in the pass that the sink hooks. Raises InvalidRequest where rows attend by a continuation of their own
        (APE), and the sink's errors.
        """
        if self.continuation is not None:
            raise InvalidRequest(
                "the recipe attends to the context in a group of its own, which retrieval does not know; choose another "
                "recipe, or leave kv_budget out"
            )
        sink.begin(self.positions)
        self._shared.sink = sink

    def before_layer(self, layer: int) -> None:
        """Write the layers before this one to the sink, if there is one."""
        if self._shared.sink is None:
            return
        for index, done in enumerate(self.layers[:layer]):
            kv = done.pop_kv()
            if kv is not None:
                self._shared.sink.write(index, *kv)

    def release(self) -> None:
        """Release the stored tensors after the last layer was written to the sink; no pass can run any more."""
        self._shared.release()

    def layer_kv(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of all prompt positions that a layer holds now, (1, G, N, D); read only.

        Zeros where nothing is placed or computed. `like` (1, G, T, D) are other keys of the model.
        """
        kv: tuple[Tensor, Tensor] = self.layers[layer].prompt_kv(like)
        return kv

    def truncate_appended(self, tokens: int) -> None:
        """Drop appended tokens beyond a total of `tokens`, in every layer."""
        for layer in self.layers:
            layer.appended = min(layer.appended, max(0, tokens - self.length))

    def truncate_prompt(self, tokens: int) -> None:
        """Continue from the first `tokens` positions; appended tokens overwrite what follows them."""
        self._shared.length = tokens
        for layer in self.layers:
            layer.appended = 0


class FusedCacheLayer(CacheLayerMixin):
    """One layer of a fused cache: buffers `keys`, `values` (B, G, capacity, D) in prompt order, owned by the request."""

    is_sliding = False
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, shared: "SharedLayerState", index: int) -> None:
        super().__init__()
        self._shared = shared
        self._index = index
        self.appended = 0  # rows written in append mode, after the prompt

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device for the library; `update` makes the buffers."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new rows (B, G, T, D) and return all valid keys and values in prompt order."""
        shared = self._shared
        if shared.rows is None:
            return self._append(key_states, value_states)
        self._make_buffers(key_states, value_states)
        if shared.capture is not None:
            shared.capture.record(self._index, shared.rows, key_states, value_states)
        self.keys.index_copy_(2, shared.rows, key_states)
        self.values.index_copy_(2, shared.rows, value_states)
        return self.keys[:, :, : shared.length], self.values[:, :, : shared.length]

    def prompt_kv(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's keys and values of all prompt positions, read only; see `FusedCache.layer_kv`."""
        length = self._shared.length
        if self._shared.sink is not None and not self.is_initialized:  # nothing would drop the buffers
            keys, values = self._shared.materialize(self._index, like)
            return keys[:, :, :length], values[:, :, :length]
        self._make_buffers(like, like)
        return self.keys[:, :, :length], self.values[:, :, :length]

    def pop_kv(self) -> tuple[Tensor, Tensor] | None:
        """Drop the buffers and return their keys and values (G, N, D); None without buffers."""
        if not self.is_initialized:
            return None
        kv = self.keys[0, :, : self._shared.length], self.values[0, :, : self._shared.length]
        self.keys = self.values = self.keys.new_empty(0)
        self.is_initialized = False
        return kv

    def _make_buffers(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the buffers, with the placed spans in them, unless they exist."""
        if not self.is_initialized:
            self.keys, self.values = self._shared.materialize(self._index, key_states)
            self.lazy_initialization(key_states, value_states)

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._make_buffers(key_states, value_states)
        if self.keys.shape[0] < key_states.shape[0]:  # generate runs beams and several samples as a batch
            self.batch_repeat_interleave(key_states.shape[0] // self.keys.shape[0])
        start = self._shared.length + self.appended
        end = start + key_states.shape[2]
        if end > self.keys.shape[2]:
            grown = end + end // 2 - self.keys.shape[2]
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, grown))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, grown))
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.appended += key_states.shape[2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset for the library's masks."""
        writing = self._shared.rows is not None
        return (self._shared.length if writing else self.get_seq_length() + query_length), 0

    def get_seq_length(self) -> int:
        """Return the number of positions held."""
        return self._shared.length + self.appended

    def get_max_length(self) -> int:
        """Return -1, no maximum: buffers grow."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions; the library passes a negative number of tokens."""
        self.appended -= abs(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as beam search needs."""
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the chosen sequences."""
        self.keys, self.values = self.keys[indices], self.values[indices]


class SharedLayerState:
    """What the layers of a fused cache share.

    The cache holds its layers and they hold this object, without a reference cycle. So the tensors are freed with the
    cache's last reference; waiting for Python's garbage collector could hold gigabytes in a large process.
    """

    def __init__(
        self, layers: int, length: int, spans: tuple[PlacedSpan, ...], angles: PlacedRotation
    ) -> None:
        self.length = length
        self.spans = spans
        self.rows: Tensor | None = None  # (T,), what updates write during a pass; None means append mode
        self.capture: RowCapture | None = None
        self.sink: LayerSink | None = None
        self.place_s = 0.0
        self._angles = angles
        self._layers_left = layers  # without buffers

    def materialize(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make a layer's keys and values (1, G, capacity, D), with the placed spans in them.

        Once for each layer, or once in every pass while layers stream to a sink. Raises InvalidRequest afterwards.
        """
        if not self._layers_left:
            raise InvalidRequest("this cache has streamed its KV to a sink; prefill the prompt again")
        started = time.perf_counter()
        capacity = self.length + SPARE_TOKENS
        keys, values = (like.new_empty(1, like.shape[1], capacity, like.shape[3]) for _ in range(2))
        covered = 0  # up to here, everything is written
        for span in self.spans:
            stored = span.kv.layer(layer).to(like.device)  # (2, G, S, D)
            for buffer, own in zip((keys[0], values[0]), stored, strict=True):
                buffer[:, covered : span.start] = 0
                buffer[:, span.start : span.end] = own
            covered = span.end
        keys[:, :, covered:] = 0
        values[:, :, covered:] = 0
        placed = keys[:, :, self.spans[0].start if self.spans else 0 : covered]
        for start in range(0, placed.shape[2], ROTATED_TOKENS):
            some = placed[:, :, start : start + ROTATED_TOKENS]
            some.copy_(self._angles.rotate(layer, some, start))
        if self.sink is None:
            self._layers_left -= 1
            if not self._layers_left:
                self.release()  # every layer has its own copy
        self.place_s += time.perf_counter() - started
        return keys, values

    def release(self) -> None:
        """Release the stored tensors; no layer can be materialized any more."""
        self._layers_left, self.spans = 0, ()
