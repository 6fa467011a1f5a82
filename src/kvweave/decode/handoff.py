"""From a prompt's canvas to KV that is decoded by retrieval, layer by layer.

A layer is clustered and written when the pass that computes it goes on to the next, so that beside what retrieval holds
one layer at a time is in memory. Knows nothing of recipes.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionCall, LayerQueries, RowPlan
from kvweave.models.fused_cache import FusedCache
from kvweave.models.support import Geometry

MOST_QUERY_ROWS = 32
"""Rows whose queries are looked at; each of them counts what it would retrieve."""


class PromptOffloader:
    """Takes a prompt over from its canvas into `held`; see `models.layer_taker`.

    The queries of the pass' last rows tell what is retrieved together. `files` names where the KV lies if it is to be
    kept, see `saving`. Close what is held. Raises InvalidRequest for `resident_bytes` that are too few, StoreError and
    StoreFull for the disk.
    """

    def __init__(
        self, geometry: Geometry, settings: OffloadSettings, files: tuple[Path, Path] | None = None
    ) -> None:
        self.settings = settings
        self._geometry, self._files = geometry, files
        self._held: OffloadedCache | None = None
        self._taken = 0
        self._seen: tuple[int, Tensor, int | None] | None = None

    @property
    def held(self) -> OffloadedCache:
        """What has been taken over; there must have been a prompt, and all its layers."""
        assert self._held is not None
        assert self._taken == self._geometry.layers
        return self._held

    @property
    def bounded(self) -> bool:
        """Whether there is a bound of memory to keep."""
        return self.settings.resident_bytes is not None

    def begin(self, positions: Tensor) -> None:
        """Begin anew with a prompt at rotary positions (N,)."""
        self.close()
        self._held = OffloadedCache(self._geometry, self.settings, positions, self._files)
        self._taken, self._seen = 0, None

    def see(self, queries: LayerQueries) -> None:
        """Keep a copy of the last rows' queries, and the layer's own window."""
        self._seen = queries.layer, queries.query[0, :, -MOST_QUERY_ROWS:].clone(), queries.window

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Cluster a layer (G, N, D) that was seen, and write it."""
        if self._seen is not None and self._seen[0] == layer:
            assert self._held is not None
            self._held.fill(layer, keys, values, *self._seen[1:])
            self._taken += 1

    def close(self) -> None:
        """Close what is held; closing twice is fine."""
        if self._held is not None:
            self._held.close()


def enter(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    question_tokens: int = 1,
    files: tuple[Path, Path] | None = None,
) -> OffloadedCache:
    """Give a canvas that holds the whole prompt over to retrieval; it cannot be used afterwards.

    `question_tokens` at the prompt's end may be computed again without changing anything: they were computed, not
    reused. That is the pass in which the layers go. Close what is returned. Raises as `PromptOffloader`, and InvalidRequest for a
    canvas whose rows attend in a way of their own (APE).
    """
    first = kv_cache.length - min(question_tokens, MOST_QUERY_ROWS)
    return _handed_over(adapter, kv_cache, token_ids, first, settings, files)[0]


def computed(
    adapter: Adapter,
    token_ids: Sequence[int],
    settings: OffloadSettings,
    files: tuple[Path, Path] | None = None,
) -> tuple[OffloadedCache, Tensor]:
    """All of a text computed by one pass with plain causal attention; also the logits (1, vocab) behind it.

    Close what is returned. Raises as `PromptOffloader`.
    """
    return _handed_over(adapter, adapter.new_cache(len(token_ids)), token_ids, 0, settings, files)


def _handed_over(
    adapter: Adapter,
    kv_cache: FusedCache,
    token_ids: Sequence[int],
    first: int,
    settings: OffloadSettings,
    files: tuple[Path, Path] | None,
) -> tuple[OffloadedCache, Tensor]:
    """What takes the layers in a pass that computes the rows from `first` on, and the logits (1, vocab) behind them."""
    entering = PromptOffloader(adapter.geometry, settings, files)
    try:
        kv_cache.hand_over(entering)
        plan = adapter.rows(torch.arange(first, kv_cache.length))
        plan.hooks.append(entering)
        logits = adapter.compute(kv_cache, token_ids, plan)
        kv_cache.let_go()
    except BaseException:
        entering.close()
        raise
    return entering.held, logits


def entered(kv_cache: FusedCache) -> OffloadedCache | None:
    """What a canvas has handed its layers over to, if it has."""
    return kv_cache.sink.held if isinstance(kv_cache.sink, PromptOffloader) else None


class TurnAppender:
    """Puts a turn behind `held`, which holds all of `token_ids` and begins with the system prefix `prefix`.

    What `models.earlier_text` and `models.layer_taker` ask for, for one prefill. A step's budget and the bound of memory are
    those of `held`, which cannot be used any more if a pass fails that has begun to hand its layers over.
    """

    bounded = True

    def __init__(
        self, adapter: Adapter, held: OffloadedCache, token_ids: Sequence[int], prefix: Sequence[int]
    ) -> None:
        self.token_ids, self.prefix = tuple(token_ids), tuple(prefix)
        self._adapter, self._held = adapter, held
        self._seen: tuple[int, int | None] | None = None

    def positions(self, count: int) -> Tensor:
        """The rotary positions (count,) behind the text."""
        return self._held.positions_of(self._held.next_rows(count))

    def plan(self, rows: Tensor) -> RowPlan:
        """Rows (T,) of the turn attend to what a step would retrieve, and causally to the turn."""
        geometry = self._adapter.geometry
        return TurnPlan(self._held, rows.to(geometry.device), geometry.dtype)

    def begin(self, positions: Tensor) -> None:
        """Nothing has been taken yet: damaged KV was found before. Raises InvalidRequest where LongRoPE outgrows the text."""
        self._adapter.check_goes_on(self._held, positions.numel())

    def see(self, queries: LayerQueries) -> None:
        """Note the layer and its window."""
        self._seen = queries.layer, queries.window

    def take(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append a layer's rows (G, N, D), if it was seen."""
        if self._seen is not None and self._seen[0] == layer:
            self._held.append(layer, keys, values, self._seen[1])


class TurnPlan(RowPlan):
    """Rows (T,) of a prompt attend to the text `held` and causally to the prompt."""

    def __init__(self, held: OffloadedCache, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._held = held

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); keys and values of the call are the prompt's."""
        self.show(call)
        return self._held.attend_behind(call, self.rows)
