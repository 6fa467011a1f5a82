"""Streams a prompt's KV from its fused cache to an offloaded one, layer by layer.

Each layer is clustered and written as soon as the pass moves on to the next. In addition to the offloaded cache, one
layer at a time is in memory. Knows nothing of recipes.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.hooks import LayerQueries
from kvweave.models.support import Geometry

MAX_QUERY_ROWS = 32
"""Rows at a prompt's end whose queries decide which clusters become neighbours."""


def offload(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    question_tokens: int = 1,
    files: tuple[Path, Path] | None = None,
) -> OffloadedCache:
    """Move a fused cache that holds the whole prompt to disk; `kv_cache` cannot be used afterwards.

    The layers move in a pass that computes up to `question_tokens` at the prompt's end once more. These must be computed
    tokens, not reused ones, so that nothing changes. The caller closes the result.

    Raises as `PromptOffloader`, and InvalidRequest for a cache whose rows attend in a way of their own (APE).
    """
    first = kv_cache.length - min(question_tokens, MAX_QUERY_ROWS)
    return _compute(adapter, kv_cache, token_ids, first, settings, files)[0]


def prefill_offloaded(
    adapter: Adapter,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    files: tuple[Path, Path] | None = None,
) -> tuple[OffloadedCache, Tensor]:
    """Compute a text in one pass with plain causal attention; return its cache and the last logits (1, vocab).

    The caller closes the cache. Raises as `PromptOffloader`.
    """
    return _compute(adapter, adapter.new_cache(len(token_ids)), token_ids, 0, settings, files)


def offloaded_cache_of(kv_cache: FusedCache) -> OffloadedCache | None:
    """Return the offloaded cache that a fused cache has streamed its layers to, if any."""
    return kv_cache.sink.cache if isinstance(kv_cache.sink, PromptOffloader) else None


def _compute(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    first: int,
    settings: OffloadSettings,
    files: tuple[Path, Path] | None,
) -> tuple[OffloadedCache, Tensor]:
    """Offload the layers in a pass over the rows from `first` on; return the cache and the last logits (1, vocab)."""
    offloader = PromptOffloader(adapter.geometry, settings, files)
    try:
        kv_cache.stream_to(offloader)
        plan = adapter.rows(torch.arange(first, kv_cache.length))
        plan.hooks.append(offloader)
        logits = adapter.compute(kv_cache, token_ids, plan)
        kv_cache.release()
    except BaseException:
        offloader.close()
        raise
    return offloader.cache, logits


class PromptOffloader:
    """Writes a prompt's layers to an offloaded cache; a `LayerSink`. The caller closes `cache`.

    The queries of the pass's last rows decide which clusters become neighbours on disk. `files` are the paths of the KV
    if it is to be persisted, see `persistence`.

    Raises InvalidRequest if `resident_bytes` is too small, StoreError and StoreFull for the disk.
    """

    def __init__(
        self, geometry: Geometry, settings: OffloadSettings, files: tuple[Path, Path] | None = None
    ) -> None:
        self.settings = settings
        self._geometry, self._files = geometry, files
        self._cache: OffloadedCache | None = None
        self._written_layers = 0
        self._current: tuple[int, Tensor, int | None] | None = None  # layer, last queries, sliding window

    @property
    def cache(self) -> OffloadedCache:
        """The cache, once all layers of a prompt are written."""
        assert self._cache is not None
        assert self._written_layers == self._geometry.layers
        return self._cache

    @property
    def bounded(self) -> bool:
        """Whether there is a memory limit."""
        return self.settings.resident_bytes is not None

    def begin(self, positions: Tensor) -> None:
        """Start over with a prompt at rotary positions (N,)."""
        self.close()
        self._cache = OffloadedCache(self._geometry, self.settings, positions, self._files)
        self._written_layers, self._current = 0, None

    def on_layer(self, queries: LayerQueries) -> None:
        """Copy the last rows' queries, and note the layer's own window."""
        self._current = queries.layer, queries.query[0, :, -MAX_QUERY_ROWS:].clone(), queries.window

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Cluster and write a layer (G, N, D) that this pass attended to."""
        if self._current is not None and self._current[0] == layer:
            assert self._cache is not None
            self._cache.fill(layer, keys, values, *self._current[1:])
            self._written_layers += 1

    def close(self) -> None:
        """Close the cache, if there is one; closing twice is fine."""
        if self._cache is not None:
            self._cache.close()


class TurnAppender:
    """Appends a turn to `cache`, which holds all of `token_ids` and starts with the system prefix `prefix`.

    A `LayerSink` and `PrefixContext` for one prefill, with the entry budget and memory limit of `cache`. If a pass fails
    after its first layer, `cache` is unusable.
    """

    bounded = True

    def __init__(
        self, adapter: Adapter, cache: OffloadedCache, token_ids: Sequence[int], prefix: Sequence[int]
    ) -> None:
        self.token_ids, self.prefix = tuple(token_ids), tuple(prefix)
        self._adapter, self._cache = adapter, cache
        self._current: tuple[int, int | None] | None = None  # layer, sliding window

    def positions(self, count: int) -> Tensor:
        """Return the rotary positions (count,) after the text."""
        return self._cache.positions_of(self._cache.next_rows(count))

    def plan(self, rows: Tensor) -> RowPlan:
        """Return a plan by which rows (T,) of the turn attend to what a step would retrieve, and causally to the turn."""
        geometry = self._adapter.geometry
        return TurnPlan(self._cache, rows.to(geometry.device), geometry.dtype)

    def begin(self, positions: Tensor) -> None:
        """Check that the turn fits; nothing has been written yet. Raises InvalidRequest if LongRoPE needs other frequencies."""
        self._adapter.check_append(self._cache, positions.numel())

    def on_layer(self, queries: LayerQueries) -> None:
        """Note the layer and its window."""
        self._current = queries.layer, queries.window

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append a layer's rows (G, N, D) if this pass attended to it."""
        if self._current is not None and self._current[0] == layer:
            self._cache.append(layer, keys, values, self._current[1])


class TurnPlan(RowPlan):
    """Rows (T,) of a prompt attend to the text in `cache`, and causally to the prompt."""

    def __init__(self, cache: OffloadedCache, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._cache = cache

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); `call` has the prompt's keys and values."""
        self.notify_hooks(call)
        return self._cache.attend_turn(call, self.rows)
