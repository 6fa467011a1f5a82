"""The KV of one request, as a transformers Cache that chosen rows can be written into in place.

A canvas starts as a list of placed spans: stored chunk KV, unrotated and read-only, each with the prompt
position it stands at. At a layer's first update the spans are rotated to their positions and laid out in
prompt order. Every pass writes its rows in place, over stale ones too. Stored tensors are never written to.

After prefill the canvas turns to append mode and any transformers `generate` continues on it. Knows
nothing about stores or methods.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvweave.core import ChunkKV
from kvweave.models.attention import RowPlan
from kvweave.models.rotary import Angles, RotationWatch
from kvweave.models.updates import Update, UpdateWatch
from kvweave.ops.attention import AttentionInput, KeyRows, merge

SPARE_TOKENS = 64  # room for the first generated tokens before a layer has to grow


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """Stored KV standing at prompt positions `start` … `start + kv.tokens`, rotated as if it began at `rope_start`.

    `offsets` (tokens,) are the rotary positions behind `rope_start` where tokens of a chunk are left out between them.
    """

    kv: ChunkKV
    start: int
    rope_start: int
    offsets: Tensor | None = None

    def rope_positions(self, device: torch.device) -> Tensor:
        """(tokens,): where each token is rotated to."""
        offsets = torch.arange(self.kv.tokens) if self.offsets is None else self.offsets
        return (self.rope_start + offsets).to(device)


class RowCapture:
    """Collects the unrotated K and the V of the rows that a pass computes, for a prompt of `length` tokens.

    `kv` is (L, 2, G, N, D) once the pass has run; only rows that it computed are valid. Owned by the request.
    """

    def __init__(self, watch: RotationWatch, layers: int, length: int) -> None:
        self.watch = watch
        self.kv: Tensor | None = None
        self._shape = (layers, length)

    def keep(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Record a layer's new rows: rotated `keys` (1, G, T, D) are exchanged for the ones seen before rotation."""
        keys = self.watch.key_before(keys)
        if self.kv is None:
            layers, length = self._shape
            self.kv = keys.new_empty(layers, 2, keys.shape[1], length, keys.shape[-1])
        self.kv[layer, 0].index_copy_(1, rows, keys[0])
        self.kv[layer, 1].index_copy_(1, rows, values[0])


class CanvasLayer(CacheLayerMixin):
    """One layer of the canvas: buffers `keys`, `values` (B, G, capacity, D) in prompt order, owned by the request."""

    is_sliding = False
    is_croppable = True

    def __init__(self, canvas: "Canvas", index: int) -> None:
        super().__init__()
        self._canvas = canvas
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
        canvas = self._canvas
        if canvas.rows is None:
            return self._append(key_states, value_states)
        if not self.is_initialized:
            self._lay_out(key_states)
            self.lazy_initialization(key_states, value_states)
        if canvas.update_watch is not None:
            canvas.update_watch.see(self._replacing(canvas.rows, key_states, value_states))
        if canvas.capture is not None:
            canvas.capture.keep(self._index, canvas.rows, key_states, value_states)
        self.keys.index_copy_(2, canvas.rows, key_states)
        self.values.index_copy_(2, canvas.rows, value_states)
        return self.keys[:, :, : canvas.length], self.values[:, :, : canvas.length]

    def _lay_out(self, like: Tensor) -> None:
        canvas = self._canvas
        started = time.perf_counter()
        nothing = torch.empty(0, dtype=torch.long, device=like.device)
        given = AttentionInput(
            shared=canvas.shared_rows(self._index, like),
            private=KeyRows(like[:, :, :0], like[:, :, :0], nothing),
            skip=nothing,
        )
        self.keys, self.values = merge(given, canvas.length, canvas.length + SPARE_TOKENS)
        if all(layer.keys is not None for layer in canvas.layers):
            canvas.spans = ()  # all layers have their own copy: let go of the stored tensors
        canvas.place_s += time.perf_counter() - started

    def held_keys(self, like: Tensor) -> Tensor:
        """The keys that this layer holds, (1, G, N, D), to be read only; see `Canvas.held_keys`."""
        if not self.is_initialized:
            self._lay_out(like)
            self.lazy_initialization(like, like)
        return self.keys[:, :, : self._canvas.length]

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
        if self.keys.shape[0] < key_states.shape[0]:  # generate runs beams and several samples as a batch
            self.batch_repeat_interleave(key_states.shape[0] // self.keys.shape[0])
        start = self._canvas.length + self.appended
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
            self._canvas.length if self._canvas.rows is not None else self.get_seq_length() + query_length
        ), 0

    def get_seq_length(self) -> int:
        """Positions held so far."""
        return self._canvas.length + self.appended

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


class Canvas(Cache):
    """A request's KV over a prompt of `length` tokens.

    `spans` are placed before the first pass; positions they do not cover must be computed by a pass before
    any row attends to them; `angles` holds their rotary positions as runs, in the same order. `positions` (N,) are
    the rotary positions of all prompt tokens, the last one the largest.

    `continuation` makes the plan by which rows behind the prompt attend, (T,) to plan; None means plain causal
    attention. `rows` (set by the adapter for the duration of a pass) selects the rows that an update writes; None
    means append mode. `place_s` sums the seconds spent rotating and laying out.
    """

    def __init__(
        self, layers: int, length: int, spans: tuple[PlacedSpan, ...], angles: Angles, positions: Tensor
    ) -> None:
        self.length = length
        self.spans = spans
        self.positions = positions
        self.continuation: Callable[[Tensor], RowPlan] | None = None
        self.rows: Tensor | None = None
        self.update_watch: UpdateWatch | None = None
        self.capture: RowCapture | None = None
        self.place_s = 0.0
        self._angles = angles
        indices = torch.arange(positions.numel(), device=positions.device)
        self._at_indices = torch.equal(positions, indices)
        super().__init__(layers=[CanvasLayer(self, index) for index in range(layers)])

    @property
    def plain(self) -> bool:
        """Whether every token stands at its index and what follows the prompt attends as the model alone would."""
        return self._at_indices and self.continuation is None

    def __bool__(self) -> bool:
        """Whether computing the text anew gives the same: LongRoPE families' `generate` then drops a true cache.

        It does so when the text outgrows the short frequencies, by the cache's truth value and without a word.
        """
        return self.plain

    @contextmanager
    def writing(self, rows: Tensor, watch: UpdateWatch | None = None) -> Iterator[None]:
        """For the length of one pass, updates write these prompt positions (T,) in place, shown to `watch` before."""
        self.rows, self.update_watch = rows, watch
        try:
            yield
        finally:
            self.rows = self.update_watch = None

    def positions_of(self, rows: Tensor) -> Tensor:
        """Rotary positions of rows (T,) of the canvas; rows behind the prompt go on from its last position."""
        inside = rows.clamp(max=self.positions.numel() - 1)
        return self.positions[inside] + (rows - inside)

    def next_rows(self, count: int) -> Tensor:
        """Where the next `count` appended tokens will stand, (count,)."""
        start = self.get_seq_length()
        return torch.arange(start, start + count, device=self.positions.device)

    def shared_rows(self, layer: int, like: Tensor) -> tuple[KeyRows, ...]:
        """The placed spans of a layer, keys rotated; values stay views of the stored tensors."""
        found = []
        for number, span in enumerate(self.spans):
            keys, values = span.kv.kv[layer].to(like.device)[:, None]  # each (1, G, S, D)
            positions = torch.arange(span.start, span.start + span.kv.tokens, device=like.device)
            found.append(KeyRows(self._angles.rotate(layer, keys, number), values, positions))
        return tuple(found)

    def held_keys(self, layer: int, like: Tensor) -> Tensor:
        """The keys of all prompt positions that a layer holds now, rotated, (1, G, N, D); to be read only.

        Zeros where nothing is placed or computed. `like` (1, G, T, D) are other keys of the model.
        """
        keys: Tensor = self.layers[layer].held_keys(like)
        return keys

    def hold(self, tokens: int) -> None:
        """Continue from the first `tokens` positions: what stands after them is overwritten by what is appended."""
        self.length = tokens
        for layer in self.layers:
            layer.appended = 0
