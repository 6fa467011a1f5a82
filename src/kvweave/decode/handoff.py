"""The KV of a text while it is decoded: in memory, or streamed from a prompt's fused cache to an offloaded one, layer by layer.

Each layer is clustered and written as soon as the pass moves on to the next. In addition to the offloaded cache, one
layer at a time is in memory. Knows nothing of recipes, nor of how tokens are chosen.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvweave.decode.offloaded_cache import OffloadedCache, OffloadedPlan
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.hooks import LayerQueries
from kvweave.models.snapshot_adapter import ModelState, SnapshotAdapter
from kvweave.models.support import Geometry
from kvweave.results import DecodeStats

MAX_QUERY_ROWS = 32
"""Rows at a prompt's end whose queries decide which clusters become neighbours."""

SHORT_TOKENS = 4096
"""A prompt below this has little KV; without a memory bound, a budget on it costs time and gains next to nothing."""
_LOG = logging.getLogger(__name__)


def offload(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    question_tokens: int = 1,
    path: Path | None = None,
) -> OffloadedCache:
    """Move a fused cache that holds the whole prompt to disk; `kv_cache` cannot be used afterwards.

    The layers move in a pass that computes up to `question_tokens` at the prompt's end once more. These must be computed
    tokens, not reused ones, so that nothing changes. The caller closes the result.

    Raises as `PromptOffloader`, and InvalidRequest for a cache whose rows attend in a way of their own (APE).
    """
    first = kv_cache.length - min(question_tokens, MAX_QUERY_ROWS)
    return _compute(adapter, kv_cache, token_ids, first, settings, path)[0]


def prefill_offloaded(
    adapter: Adapter,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    path: Path | None = None,
) -> tuple[OffloadedCache, Tensor]:
    """Compute a text in one pass with plain causal attention; return its cache and the last logits (1, vocab).

    The caller closes the cache. Raises as `PromptOffloader`.
    """
    return _compute(adapter, adapter.new_cache(len(token_ids)), token_ids, 0, settings, path)


def offloaded_cache_of(kv_cache: FusedCache) -> OffloadedCache | None:
    """Return the offloaded cache that a fused cache has streamed its layers to, if any."""
    return kv_cache.sink.cache if isinstance(kv_cache.sink, PromptOffloader) else None


def _compute(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    first: int,
    settings: OffloadSettings,
    path: Path | None,
) -> tuple[OffloadedCache, Tensor]:
    """Offload the layers in a pass over the rows from `first` on; return the cache and the last logits (1, vocab)."""
    offloader = PromptOffloader(adapter.geometry, settings, path)
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

    The queries of the pass's last rows decide which clusters become neighbours on disk. `path` is that of the KV's file
    if it is to be persisted, see `persistence`.

    Raises InvalidRequest if `resident_bytes` is too small, StoreError and StoreFull for the disk.
    """

    def __init__(self, geometry: Geometry, settings: OffloadSettings, path: Path | None = None) -> None:
        self.settings = settings
        self._geometry, self._path = geometry, path
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
        return self.settings.resident_bytes is not None

    def begin(self, positions: Tensor) -> None:
        """Start over with a prompt at rotary positions (N,)."""
        self.close()
        if self.settings.kv_budget != 1 and not self.bounded and positions.numel() < SHORT_TOKENS:
            _LOG.warning(
                "decoding with a KV budget is slower than without one on a text of %d tokens, whose KV takes %.0f MB; "
                "leave the budget out",
                positions.numel(),
                positions.numel() * self._geometry.token_bytes / 1e6,
            )
        self._cache = OffloadedCache(self._geometry, self.settings, positions, self._path)
        self._written_layers, self._current = 0, None

    def on_layer(self, queries: LayerQueries) -> None:
        """Copy the last rows' queries, and note the layer's own window."""
        self._current = queries.layer, queries.query[0, :, -MAX_QUERY_ROWS:].clone(), queries.settings.window

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Cluster and write a layer (G, N, D) that this pass attended to."""
        if self._current is not None and self._current[0] == layer:
            assert self._cache is not None
            self._cache.fill(layer, keys, values, *self._current[1:])
            self._written_layers += 1

    def close(self) -> None:
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
        self._current = queries.layer, queries.settings.window

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append a layer's rows (G, N, D) if this pass attended to it."""
        if self._current is not None and self._current[0] == layer:
            self._cache.append(layer, keys, values, self._current[1])


class TurnPlan(OffloadedPlan):
    """Rows (T,) of a prompt attend to the text in `cache`, and causally to the prompt."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); `call` has the prompt's keys and values."""
        self.notify_hooks(call)
        return self.cache.attend_turn(call, self.rows)


# The KV of a text that grows


class DecodeState:
    """The KV of a text that grows from a prompt: in `kv_cache`, which it owns, or offloaded as `kv` says.

    Where the prefill has streamed the layers to a file, they are offloaded already. Closing it deletes the file.

    Raises:
        InvalidRequest: `kv` differs from what the prefill offloaded for.
    """

    def __init__(self, adapter: Adapter, kv_cache: FusedCache, kv: OffloadSettings | None = None) -> None:
        self.kv_cache = kv_cache
        self._offloaded = offloaded_cache_of(kv_cache)
        self._adapter, self._kv = adapter, kv
        if self._offloaded is not None:
            self._kv = self._offloaded.settings
            if kv not in (None, self._kv):
                self.close()
                raise InvalidRequest(
                    f"prefill got kv={self._kv} and generate got kv={kv}; pass the same to both, or only to prefill"
                )

    def offload(self, token_ids: Sequence[int], question_tokens: int) -> None:
        """Offload the KV of all `token_ids` if the settings say so; see `offload`."""
        if self._kv is not None and self._offloaded is None:
            self._offloaded = offload(self._adapter, self.kv_cache, token_ids, self._kv, question_tokens)

    @property
    def in_memory(self) -> bool:
        """Whether all KV is in memory, as the model's own attention reads it."""
        return self._offloaded is None

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, whose last token is not in the KV yet."""
        if not self.needs_rope_rescale(len(token_ids)):
            kv = self.kv_cache if self._offloaded is None else self._offloaded
            return self._adapter.step(kv, token_ids[-1])
        self.close()
        if self._kv is not None:
            self._offloaded, logits = prefill_offloaded(self._adapter, token_ids, self._kv)
            return logits
        return self.recompute(token_ids)

    def recompute(self, token_ids: Sequence[int]) -> Tensor:
        """Compute all of `token_ids` in memory with full attention; return the logits (1, vocab) after them."""
        self.kv_cache = self._adapter.new_cache(len(token_ids))
        every_row = self._adapter.rows(torch.arange(len(token_ids)))
        return self._adapter.compute(self.kv_cache, token_ids, every_row)

    def needs_rope_rescale(self, tokens: int) -> bool:
        """Return whether a text of this length is computed again, since its last token needs other rotary frequencies.

        A cache with its own positions or continuation is not: it would become another text, and the step raises.
        """
        return self._adapter.needs_rope_rescale(tokens) and (
            self._offloaded is not None or self.kv_cache.plain
        )

    @property
    def cost(self) -> DecodeStats | None:
        """What offloaded decoding has read and kept in memory so far; None if all KV is in memory."""
        return None if self._offloaded is None else self._offloaded.counts.per_token()

    def close(self) -> None:
        if self._offloaded is not None:
            self._offloaded.close()


class PersistentDecodeState:
    """A conversation's KV: it grows in its files and outlives the reply. Its owner closes it.

    `recompute` computes all tokens of a text from scratch, where the KV cannot be extended; it returns the new KV and
    the logits (1, vocab) after the text.
    """

    def __init__(
        self,
        adapter: Adapter,
        kv: OffloadedCache,
        recompute: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
    ) -> None:
        self.kv = kv
        self._adapter, self._recompute = adapter, recompute

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        if not self._adapter.needs_rope_rescale(len(token_ids)):
            return self._adapter.step(self.kv, token_ids[-1])
        self.kv, logits = self._recompute(token_ids)
        return logits

    def hold(self, token_ids: Sequence[int]) -> None:
        """Make the KV hold a finished text: the KV may lack its last token, or hold tokens behind its end.

        Nothing can be removed from the files, so a text that lost tokens is computed again.
        """
        if self.kv.get_seq_length() > len(token_ids):
            self.kv, _ = self._recompute(token_ids)
        elif self.kv.get_seq_length() < len(token_ids):
            self.advance(token_ids)

    @property
    def cost(self) -> DecodeStats | None:
        return self.kv.counts.per_token()


class PlainDecodeState:
    """The state of a model that is run plainly, all in memory. It only grows: no token can be taken back."""

    cost: DecodeStats | None = None

    def __init__(self, adapter: SnapshotAdapter, state: ModelState) -> None:
        self._adapter, self._state = adapter, state

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, whose last token is not in the state yet."""
        return self._adapter.extend(self._state, token_ids[-1:])
