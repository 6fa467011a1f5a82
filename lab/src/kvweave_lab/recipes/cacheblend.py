"""Variants of CacheBlend: keys compared too, and a selection that shrinks from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionHook, LayerQueries
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.methods.cacheblend import ValueDeviation
from kvweave.recipes.prefill_state import SECOND_LAYER, PrefillState
from kvweave.recipes.recipe import Recipe, Recompute, SelectedRows
from kvweave.recipes.select import TopScores
from kvweave_lab.recipes.idealised import stored_values
from kvweave_lab.recipes.row_schedule import scheduled


def with_keys() -> Recipe:
    """CacheBlend that compares keys as well as values.

    Paper: CacheBlend (arXiv 2405.16444) §4, which speaks of the deviation of a token's KV.
    Idea: a wrong key harms as a wrong value does.
    Parameters: ratio 0.15.
    Differs from the paper: as `cacheblend`; keys and values have the same weight, whatever their sizes.
    Relations: `cacheblend` compares values alone, as ProphetKV App. C states it.
    """
    score = KeyValueDeviation()
    return Recipe("cacheblend-kv", match=MatchPathThenChunk(), select=TopScores(score), ratio=0.15)


def gradual() -> Recipe:
    """CacheBlend with a selection that shrinks from layer to layer.

    Paper: CacheBlend (arXiv 2405.16444) §4.3 (gradual filtering).
    Idea: a layer computed for a few more tokens than needed shows better than the second layer alone which of them are
        worth computing in the next.
    Parameters: ratio 0.15 on average over the layers, half as much again in the first and half of it in the last.
    Differs from the paper: the schedule, which the paper leaves open; it begins when the second layer has been compared
        in full, which costs one layer of the whole context.
    Relations: `cacheblend` computes the same rows in all layers. The rows reported as recomputed are those that it would
        select. Here some of them leave early and others take part in their place, the same number on average.
    """
    return Recipe(
        "cacheblend-gradual",
        match=MatchPathThenChunk(),
        select=TopScores(ValueDeviation()),
        recompute=LayerByLayer(),
        ratio=0.15,
    )


@dataclass(frozen=True, slots=True)
class KeyValueDeviation:
    """Squared distance of each token's stale key and value from the new ones, keys as they are rotated in the prompt."""

    supports_coverage: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Run one full layer and the second layer's projections."""
        off = state.second_layer
        return off.keys.square().sum(dim=(0, 2)) + off.values.square().sum(dim=(0, 2))


@dataclass(frozen=True, slots=True)
class LayerByLayer(Recompute):
    """As many stale rows as were selected on average over the layers, more in the first layers and fewer in the last.

    With k rows selected of n stale ones and L layers, layer l = 0 … L − 1 computes k + e(l) rows. e falls evenly from
    d to −d, d = min(k / 2, n − k), rounded towards 0. The first layers compute the rows whose values are furthest off in
    the second layer. From the third layer on, those of the running rows are computed whose values were furthest off in
    the layer before.
    """

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Run one pass. Of the selected rows only the number counts, unless they are those furthest off."""
        request = state.request
        count = int((~torch.isin(rows, state.fresh)).sum())
        if request.budget.recomputes_all or not count:
            return SelectedRows().run(state, rows, hooks, capture=capture)
        counts = rows_per_layer(count, state.stale.numel(), request.adapter.geometry.layers)
        schedule = _ShrinkingRows(state, counts)
        return request.adapter.compute(
            state.kv_cache,
            request.prompt.token_ids,
            scheduled(state.plan(schedule.rows, schedule, *hooks), state.kv_cache, schedule),
            capture=capture,
        )


def rows_per_layer(count: int, stale: int, layers: int) -> list[int]:
    """Return how many of the stale rows each layer computes, `count` on average; see LayerByLayer."""
    most = min(count, 2 * (stale - count))  # 2 d
    steps = [most * (layers - 1 - 2 * layer) for layer in range(layers)]
    divisor = 2 * (layers - 1)
    return [count + (step // divisor if step > 0 else -(-step // divisor)) for step in steps]


class _ShrinkingRows:
    """Measures how far the rows of a pass are off in each layer, and keeps those that are furthest off."""

    def __init__(self, state: PrefillState, counts: Sequence[int]) -> None:
        self._state = state
        self._counts = counts
        self._running, self._off = state.stale, state.second_layer.values.square().sum(dim=(0, 2))
        self._keep(counts[0])

    @property
    def rows(self) -> Tensor:
        """The rows that run now, fresh ones among them."""
        return torch.cat([self._running, self._state.fresh]).sort().values

    def rows_for(self, layer: int) -> Tensor | None:
        if self._counts[layer] == self._running.numel():
            return None
        self._keep(self._counts[layer])
        return self.rows

    def on_layer(self, queries: LayerQueries) -> None:
        if queries.layer >= SECOND_LAYER:  # before that, nothing is off
            places = torch.searchsorted(self._state.stale, self._running)
            stale = stored_values(self._state, queries.layer)[:, places].to(queries.values.device)
            off = queries.values[0][:, self._running.to(stale.device)].float() - stale.float()
            self._off = off.square().sum(dim=(0, 2)).cpu()

    def _keep(self, count: int) -> None:
        best = top_tokens(self._off, count)
        self._running, self._off = self._running[best], self._off[best]
