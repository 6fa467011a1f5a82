"""The KV of one request, as a transformers Cache that chosen rows can be written into in place.

A canvas starts as a list of placed spans: stored chunk KV, unrotated and read-only, each with the prompt
position it stands at. At a layer's first update the spans are laid out in prompt order and rotated to
their positions. Every pass writes its rows in place, over stale ones too. Stored tensors are never written to.

After prefill the canvas turns to append mode and any transformers `generate` continues on it; or it never holds
more than one layer, and hands each over as the pass goes on to the next. Knows nothing about stores or methods.
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
from kvweave.models.rotary import Angles, RotationWatch
from kvweave.models.updates import Update, UpdateHook
from kvweave.types import ChunkKV

SPARE_TOKENS = 64  # room for the first generated tokens before a layer has to grow
ROTATED_TOKENS = 4096
"""Rotated at a time, whatever chunks they are of: a rotation is many small operations, too many for each chunk, and makes copies
of what it is given, too large of a whole layer."""


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Stored KV standing at prompt positions `start` … `start + kv.tokens`, rotated as if it began at `rope_start`.

    `offsets` (tokens,) are the rotary positions behind `rope_start` where tokens of a chunk are left out between them.
    """

    kv: ChunkKV
    start: int
    rope_start: int
    offsets: Tensor | None = None

    @property
    def end(self) -> int:
        """The prompt position behind its last."""
        return self.start + self.kv.tokens

    @property
    def rope_positions(self) -> Tensor:
        """(tokens,): where each token is rotated to."""
        offsets = torch.arange(self.kv.tokens) if self.offsets is None else self.offsets
        return self.rope_start + offsets


def rope_positions(spans: Sequence[PlacedSpan]) -> Tensor:
    """Where each prompt position from the first span's beginning to the last one's end is rotated to, (S,); 0 between spans.

    `spans` are in prompt order; raises InvalidRequest if one stands over another.
    """
    if not spans:
        return torch.empty(0, dtype=torch.long)
    for before, after in pairwise(spans):
        if after.start < before.end:
            raise InvalidRequest(
                f"stored KV is placed at positions {before.start} to {before.end - 1} and again at {after.start}; place each "
                "span behind the one before"
            )
    first = spans[0].start
    positions = torch.zeros(spans[-1].end - first, dtype=torch.long)
    for span in spans:
        positions[span.start - first : span.end - first] = span.rope_positions
    return positions


class RowCapture:
    """Collects the unrotated K and the V of the rows that a pass computes, for a prompt of `length` tokens.

    `kv` is (L, 2, G, N, D) once the pass has run; only rows that it computed are valid. `queries` (L, H, N, D), unrotated,
    belong to it where whoever ran the pass wants them kept beside it. Owned by the request.
    """

    def __init__(self, hook: RotationWatch, layers: int, length: int) -> None:
        self.hook = hook
        self.kv: Tensor | None = None
        self.queries: Tensor | None = None
        self._shape = (layers, length)

    def keep(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Record a layer's new rows: rotated `keys` (1, G, T, D) are exchanged for the ones seen before rotation."""
        keys = self.hook.key_before(keys)
        if self.kv is None:
            layers, length = self._shape
            self.kv = keys.new_empty(layers, 2, keys.shape[1], length, keys.shape[-1])
        self.kv[layer, 0].index_copy_(1, rows, keys[0])
        self.kv[layer, 1].index_copy_(1, rows, values[0])


class SharedLayerState:
    """What the layers of a canvas share; see Canvas for what each part means.

    The canvas holds its layers and they hold this, so that nothing holds itself: the tensors of a canvas go with its last
    reference, and not when Python next looks for cycles, which in a large process may be gigabytes later.
    """

    def __init__(self, layers: int, length: int, spans: tuple[PlacedSpan, ...], angles: Angles) -> None:
        self.length = length
        self.spans = spans
        self.rows: Tensor | None = None
        self.written: Tensor | None = None
        self.update_hook: UpdateHook | None = None
        self.capture: RowCapture | None = None
        self.sink: LayerSink | None = None
        self.place_s = 0.0
        self._angles = angles
        self._to_lay_out = layers

    def lay_out(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values (1, G, capacity, D), the placed spans in them.

        Once for each layer, or once in every pass where layers are handed over. Raises InvalidRequest afterwards.
        """
        if not self._to_lay_out:
            raise InvalidRequest("this canvas has handed its KV over; prefill the prompt again")
        started = time.perf_counter()
        capacity = self.length + SPARE_TOKENS
        keys, values = (like.new_empty(1, like.shape[1], capacity, like.shape[3]) for _ in range(2))
        covered = 0  # up to here, everything is written
        for span in self.spans:
            stored = span.kv.layer(layer).to(like.device)  # (2, G, S, D)
            for laid, own in zip((keys[0], values[0]), stored, strict=True):
                laid[:, covered : span.start] = 0
                laid[:, span.start : span.end] = own
            covered = span.end
        keys[:, :, covered:] = 0
        values[:, :, covered:] = 0
        placed = keys[:, :, self.spans[0].start if self.spans else 0 : covered]
        for start in range(0, placed.shape[2], ROTATED_TOKENS):
            some = placed[:, :, start : start + ROTATED_TOKENS]
            some.copy_(self._angles.rotate(layer, some, start))
        if self.sink is None:
            self._to_lay_out -= 1
            if not self._to_lay_out:
                self.let_go()  # all layers have their own copy
        self.place_s += time.perf_counter() - started
        return keys, values

    def let_go(self) -> None:
        """Let go of the stored tensors: no layer will be laid out any more."""
        self._to_lay_out, self.spans = 0, ()


class FusedCacheLayer(CacheLayerMixin):
    """One layer of the canvas: buffers `keys`, `values` (B, G, capacity, D) in prompt order, owned by the request."""

    is_sliding = False
    is_croppable = True

    def __init__(self, sheet: SharedLayerState, index: int) -> None:
        super().__init__()
        self._sheet = sheet
        self._index = index
        self.appended = 0  # rows written in append mode, beyond the canvas's own length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Part of the library's interface; the buffers come into being in `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new rows (B, G, T, D) and return all valid keys and values in prompt order."""
        sheet = self._sheet
        if sheet.rows is None:
            return self._append(key_states, value_states)
        self._lay_out(key_states, value_states)
        if sheet.update_hook is not None:
            sheet.update_hook.see(self._replacing(sheet.rows, key_states, value_states))
        if sheet.capture is not None:
            sheet.capture.keep(self._index, sheet.rows, key_states, value_states)
        rows, some = sheet.rows, sheet.written
        if some is not None:
            rows, key_states, value_states = rows[some], key_states[:, :, some], value_states[:, :, some]
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys[:, :, : sheet.length], self.values[:, :, : sheet.length]

    def _lay_out(self, key_states: Tensor, value_states: Tensor) -> None:
        """If nothing has called for it so far."""
        if not self.is_initialized:
            self.keys, self.values = self._sheet.lay_out(self._index, key_states)
            self.lazy_initialization(key_states, value_states)

    def held_keys(self, like: Tensor) -> Tensor:
        """The keys that this layer holds, (1, G, N, D), to be read only; see `FusedCache.held_keys`."""
        if self._sheet.sink is not None and not self.is_initialized:  # nobody would let go of it
            return self._sheet.lay_out(self._index, like)[0][:, :, : self._sheet.length]
        self._lay_out(like, like)
        return self.keys[:, :, : self._sheet.length]

    def drop(self) -> tuple[Tensor, Tensor] | None:
        """Let go of keys and values (G, N, D), and return them; None where the layer is not laid out."""
        if not self.is_initialized:
            return None
        held = self.keys[0, :, : self._sheet.length], self.values[0, :, : self._sheet.length]
        self.keys = self.values = self.keys.new_empty(0)
        self.is_initialized = False
        return held

    def _replacing(self, rows: Tensor, key_states: Tensor, value_states: Tensor) -> Update:
        return Update(
            layer=self._index,
            rows=rows,
            keys=key_states[0],
            values=value_states[0],
            stale_keys=self.keys[0, :, rows],
            stale_values=self.values[0, :, rows],
        )

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self._lay_out(key_states, value_states)
        if self.keys.shape[0] < key_states.shape[0]:  # generate runs beams and several samples as a batch
            self.batch_repeat_interleave(key_states.shape[0] // self.keys.shape[0])
        start = self._sheet.length + self.appended
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
        """Key length and offset for the library's masks."""
        return (
            self._sheet.length if self._sheet.rows is not None else self.get_seq_length() + query_length
        ), 0

    def get_seq_length(self) -> int:
        """Positions held so far."""
        return self._sheet.length + self.appended

    def get_max_length(self) -> int:
        """No maximum: buffers grow."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; a negative number of tokens, as the library passes it."""
        self.appended -= abs(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, as beam search needs."""
        self.keys = self.keys.repeat_interleave(repeats, dim=0)
        self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep chosen sequences."""
        self.keys, self.values = self.keys[indices], self.values[indices]


class FusedCache(AppendableCache):
    """A request's KV over a prompt of `length` tokens.

    `spans`, in prompt order and none over another, are placed before the first pass; positions they do not cover must be
    computed by a pass before any row attends to them. `angles` are those of all positions from the first span's beginning
    to the last one's end. `positions` (N,) are the rotary positions of all prompt tokens, the last one the largest.

    The adapter sets `rows` and, where they are wanted, `capture` for the length of a pass.
    """

    def __init__(
        self, layers: int, length: int, spans: tuple[PlacedSpan, ...], angles: Angles, positions: Tensor
    ) -> None:
        self._sheet = SharedLayerState(layers, length, spans, angles)
        super().__init__([FusedCacheLayer(self._sheet, index) for index in range(layers)], positions)

    @property
    def length(self) -> int:
        """Prompt positions."""
        return self._sheet.length

    @property
    def spans(self) -> tuple[PlacedSpan, ...]:
        """What was placed, as long as a layer has still to lay it out."""
        return self._sheet.spans

    @property
    def place_s(self) -> float:
        """Seconds spent loading, rotating and laying out so far."""
        return self._sheet.place_s

    def load(self, layer_s: float) -> None:
        """Read the first layer of everything placed, and the others too if a layer takes longer than `layer_s`.

        Where a layer loads faster than it computes, a pass can begin with the first while the others are on their way; elsewhere
        they are better read before it takes the model, which other requests can have meanwhile (FusionRAG §4.2). How long
        a layer takes is measured on the first; of what comes over a network, on what has come so far.
        Raises DamagedEntry if a layer is not what was stored.
        """
        began = time.perf_counter()
        for span in self.spans:
            span.kv.load(0)
        awaited_s = sum(span.kv.awaited_s for span in self.spans)
        if max(time.perf_counter() - began, awaited_s) > layer_s:
            for span in self.spans:
                for layer in range(1, len(self.layers)):
                    span.kv.load(layer)
        self._sheet.place_s += time.perf_counter() - began

    @property
    def rows(self) -> Tensor | None:
        """The rows (T,) that an update writes, while a pass runs; None means append mode."""
        return self._sheet.rows

    @rows.setter
    def rows(self, rows: Tensor | None) -> None:
        self._sheet.rows = rows

    @property
    def capture(self) -> RowCapture | None:
        """What keeps the unrotated K and the V of the rows that a pass computes."""
        return self._sheet.capture

    @capture.setter
    def capture(self, capture: RowCapture | None) -> None:
        self._sheet.capture = capture

    @property
    def sink(self) -> LayerSink | None:
        """Who the layers are handed over to; None where the canvas holds them itself."""
        return self._sheet.sink

    def hand_over(self, sink: LayerSink) -> None:
        """From the next pass on hold one layer at a time: `sink` gets each when the pass goes on to the next.

        Every pass finds the layers as they were placed, without what earlier ones wrote: what is to last has to be
        computed in the pass that the taker watches. Raises InvalidRequest where rows attend in a way of their own (APE),
        and as the taker does.
        """
        if self.continuation is not None:
            raise InvalidRequest(
                "the recipe attends to the context in a group of its own, which retrieval does not know; choose another "
                "recipe, or leave kv_budget out"
            )
        sink.begin(self.positions)
        self._sheet.sink = sink

    def let_go(self) -> None:
        """The last layer has been handed over: hold nothing, stored tensors neither; nothing is computed here any more."""
        self._sheet.let_go()

    @contextmanager
    def writing(
        self, rows: Tensor, hook: UpdateHook | None = None, written: Tensor | None = None
    ) -> Iterator[None]:
        """For the length of one pass, updates write these prompt positions (T,) in place, shown to `hook` before.

        With `written` (W,), places among them, only those there: the others keep what is placed.
        """
        sheet = self._sheet
        sheet.rows, sheet.update_hook, sheet.written = rows, hook, written
        try:
            yield
            self.before_layer(len(self.layers))
        finally:
            sheet.rows = sheet.update_hook = sheet.written = None
            if sheet.sink is not None:
                for layer in self.layers:
                    layer.drop()

    def before_layer(self, layer: int) -> None:
        """Hand over the layers before this one, if they are to be."""
        if self._sheet.sink is None:
            return
        for index, done in enumerate(self.layers[:layer]):
            held = done.drop()
            if held is not None:
                self._sheet.sink.take(index, *held)

    def write_again(self, rows: Tensor) -> None:
        """For the rest of the pass only these rows (T,) are written; they were before, so that nobody is shown them."""
        self._sheet.rows, self._sheet.update_hook, self._sheet.written = rows, None, None

    def held_keys(self, layer: int, like: Tensor) -> Tensor:
        """The keys of all prompt positions that a layer holds now, rotated, (1, G, N, D); to be read only.

        Zeros where nothing is placed or computed. `like` (1, G, T, D) are other keys of the model.
        """
        keys: Tensor = self.layers[layer].held_keys(like)
        return keys

    def shrink(self, tokens: int) -> None:
        """Forget what was appended, in whichever layers, beyond a length of `tokens`."""
        for layer in self.layers:
            layer.appended = min(layer.appended, tokens - self.length)

    def hold(self, tokens: int) -> None:
        """Continue from the first `tokens` positions: what stands after them is overwritten by what is appended."""
        self._sheet.length = tokens
        for layer in self.layers:
            layer.appended = 0
