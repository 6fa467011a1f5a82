"""Variants of CacheBlend: keys compared too, and a selection that shrinks from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.attention import AttentionHook
from kvweave.models.updates import Update
from kvweave.ops.scores import top_tokens
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.methods.cacheblend import ValueDeviation
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest
from kvweave.recipes.state import CHECKED, PrefillState


@dataclass(frozen=True, slots=True)
class KeyValueDeviation:
    """The same of key and value together, keys as they are rotated in the prompt."""

    adds_up: ClassVar[bool] = True
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """As ValueDeviation."""
        off = state.second_layer
        return off.keys.square().sum(dim=(0, 2)) + off.values.square().sum(dim=(0, 2))


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """As many stale rows as were selected on the mean over the layers, more in the first ones and fewer in the last.

    With k rows selected of n stale ones and L layers, layer l = 0 … L − 1 computes k + e(l), where e falls evenly from
    d to −d, d = min(k / 2, n − k), rounded towards 0. The rows are those whose values are furthest off in the second
    layer, from the third on those of the ones still running whose values were furthest off in the layer before.
    """

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """One pass; selected rows are those furthest off in the second layer, or only counted if they are others."""
        request = state.request
        count = int((~torch.isin(rows, state.fresh)).sum())
        if request.budget.everything or not count:
            return state.run(rows, *hooks, capture=capture)
        fewer = _Shrinking(state, rows_per_layer(count, state.stale.numel(), request.adapter.geometry.layers))
        return request.adapter.compute(
            state.kv_cache,
            request.prompt.token_ids,
            state.plan(fewer.rows, *hooks),
            capture=capture,
            hook=fewer,
            narrowing=fewer,
        )


def rows_per_layer(count: int, stale: int, layers: int) -> list[int]:
    """How many of the stale rows each layer computes, `count` on the mean; see LayerByLayer."""
    most = min(count, 2 * (stale - count))  # 2 d
    steps = [most * (layers - 1 - 2 * layer) for layer in range(layers)]
    divisor = 2 * (layers - 1)
    return [count + (step // divisor if step > 0 else -(-step // divisor)) for step in steps]


class _Shrinking:
    """Sees how far the rows of a pass are off in each layer, and lets those go on that are furthest off."""

    def __init__(self, state: PrefillState, counts: Sequence[int]) -> None:
        self._fresh = state.fresh
        self._counts = counts
        self._running, self._off = state.stale, state.second_layer.values.square().sum(dim=(0, 2))
        self._leave(counts[0])

    @property
    def rows(self) -> Tensor:
        """The rows that run now, fresh ones among them."""
        return torch.cat([self._running, self._fresh]).sort().values

    def rows_for(self, layer: int) -> Tensor | None:
        if self._counts[layer] == self._running.numel():
            return None
        self._leave(self._counts[layer])
        return self.rows

    def see(self, update: Update) -> None:
        if update.layer >= CHECKED:  # before that, nothing is off
            places = torch.searchsorted(update.rows, self._running.to(update.rows.device))
            off = update.values[:, places].float() - update.stale_values[:, places].float()
            self._off = off.square().sum(dim=(0, 2)).cpu()

    def _leave(self, count: int) -> None:
        best = top_tokens(self._off, count)
        self._running, self._off = self._running[best], self._off[best]


def with_keys() -> Recipe:
    """CacheBlend that compares keys as well as values.

    Paper: CacheBlend §4, which speaks of the deviation of a token's KV.
    Idea: a wrong key harms as a wrong value does.
    Parameters: ratio 0.15.
    Differs from the paper: as `cacheblend`; keys and values are weighed alike, whatever their sizes.
    Relations: `cacheblend` looks at values alone, as ProphetKV App. C states it.
    Measured: see the methods page.
    """
    score = KeyValueDeviation()
    return Recipe("cacheblend-kv", match=MatchPathThenChunk(), select=Highest(score), ratio=0.15)


def gradual() -> Recipe:
    """CacheBlend with a selection that shrinks from layer to layer.

    Paper: CacheBlend §4.3 (gradual filtering).
    Idea: a layer computed for a few more tokens than needed tells better than the second one alone which of them are
        worth computing in the next.
    Parameters: ratio 0.15 on the mean over the layers, half as much again in the first and half of it in the last.
    Differs from the paper: the schedule, which the paper leaves open; it begins when the second layer has been compared
        in full, which costs one layer of the whole context.
    Relations: `cacheblend` computes the same rows in all layers. The rows reported as recomputed are those that it would
        select; here some of them leave early and others take part in their place, the same number on the mean.
    Measured: see the methods page.
    """
    return Recipe(
        "cacheblend-gradual",
        match=MatchPathThenChunk(),
        select=Highest(ValueDeviation()),
        recompute=LayerByLayer(),
        ratio=0.15,
    )
