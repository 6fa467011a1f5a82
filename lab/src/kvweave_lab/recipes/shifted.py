"""Recipes whose stale KV moves, where it is not recomputed, as the recomputed rows of its chunk have moved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionHook, LayerQueries
from kvweave.ops.scores import top_tokens
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prefill_state import SECOND_LAYER, PrefillState
from kvweave.recipes.recipe import Recipe, Recompute
from kvweave.recipes.select import TopScores


def weave() -> Recipe:
    """`weave`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: none; its selection and preparation are those of `weave`.
    Idea: other text before a chunk moves the keys and values of all its tokens in a common direction, beside what it does to
        each of them; the recomputed rows show that direction.
    Parameters: as `weave`; a quarter of the budget goes to evenly spaced rows, which alone show the direction, since the rows that a
        question attends to move otherwise; a chunk's mean is pulled towards that of all chunks as by 10 more rows.
    Differs from the paper: nothing to differ from.
    Relations: `prophetkv-shifted` and `cacheblend-shifted` do the same with other selections.
    """
    return _shifted("weave")


def prophetkv() -> Recipe:
    """`prophetkv`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: ProphetKV (arXiv 2602.02579) for the selection; the shift is in none.
    Idea: as `weave-shifted`.
    Parameters: as `prophetkv`.
    Differs from the paper: the shift.
    Relations: `weave-shifted`.
    """
    return _shifted("prophetkv")


def cacheblend() -> Recipe:
    """`cacheblend`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: CacheBlend (arXiv 2405.16444) for the selection; the shift is in none.
    Idea: as `weave-shifted`.
    Parameters: as `cacheblend`.
    Differs from the paper: the shift.
    Relations: `weave-shifted`.
    """
    return _shifted("cacheblend")


def _shifted(method: str) -> Recipe:
    own = recipe_named(method)
    assert isinstance(own.select, TopScores)
    select = WithSample(own.select.score)
    return replace(own, name=f"{method}-shifted", select=select, recompute=Shifted())


SAMPLED: Final = 0.25
"""Share of the recomputed rows that are evenly spaced among the stale ones."""


def sample_of(stale: Tensor, recomputed: int) -> Tensor:
    """Return evenly spaced ones of the stale rows (n,), for a budget of so many."""
    count = math.ceil(SAMPLED * recomputed)
    return stale[torch.arange(count) * len(stale) // max(1, count)]


@dataclass(frozen=True, slots=True)
class WithSample(TopScores):
    """Evenly spaced stale rows, and for the rest of the budget those of the others with the highest scores."""

    @property
    def supports_coverage(self) -> bool:
        """No: evenly spaced rows have no scores."""
        return False

    def choose(self, state: PrefillState) -> Tensor:
        """Return as many rows as the budget allows."""
        chosen = TopScores.choose(self, state)
        if not chosen.numel():
            return chosen
        sample = sample_of(state.stale, chosen.numel())
        scores = state.scores[-1].masked_fill(torch.isin(state.stale, sample), -math.inf)
        ranked = state.stale[top_tokens(scores, chosen.numel() - sample.numel())]
        return torch.cat([sample, ranked]).sort().values


@dataclass(frozen=True, slots=True)
class Shifted(Recompute):
    """All rows through all layers in one pass, which also shifts the stale rows that it does not compute.

    In each layer, before the pass' rows attend, the mean movement of a chunk's recomputed rows is added to its other stale
    rows. Keys move as they are before rotation. A chunk's mean is pulled towards that of all chunks: with k recomputed rows
    it counts k / (k + `prior`).
    """

    prior: float = 10.0

    @property
    def writes_reused(self) -> bool:
        """True: it shifts them."""
        return True

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Run one pass."""
        shift = _Shift(state, rows, self.prior)
        own: list[AttentionHook] = [shift] if shift.has_rows else []
        return state.request.adapter.compute(
            state.kv_cache,
            state.request.prompt.token_ids,
            state.plan(rows, *own, *hooks),
            capture=capture or bool(own),
        )


class _Shift:
    """Shifts the stale rows that a pass does not compute; a hook that writes to the request's own KV.

    `_left` (m,) are the prompt positions to shift and `_left_chunk` (m,) the numbers of their chunks; `_moved` and `_moved_chunk`
    the same of the evenly spaced ones among those that the pass computes, and `_shown` the latter's places in each chunk.
    """

    def __init__(self, state: PrefillState, rows: Tensor, prior: float) -> None:
        self._state, self._prior = state, prior
        device = state.request.adapter.geometry.device
        self._stale = [found for found in state.matched if found.origin == "reused"]
        counts = torch.tensor([found.span.tokens for found in self._stale], dtype=torch.long)
        chunk = torch.arange(len(self._stale)).repeat_interleave(counts)
        computed = torch.isin(state.stale, rows)
        shown = torch.isin(state.stale, sample_of(state.stale, int(computed.sum()))) & computed
        self._shown = [each.nonzero()[:, 0] for each in shown.split(counts.tolist())]
        self._moved, self._left = (state.stale[each].to(device) for each in (shown, ~computed))
        self._moved_chunk, self._left_chunk = (chunk[each].to(device) for each in (shown, ~computed))
        self.has_rows = bool(self._moved.numel() and self._left.numel())
        if self.has_rows:
            adapter, positions = state.request.adapter, state.kv_cache.positions
            like = torch.empty(0, dtype=adapter.geometry.dtype, device=device)
            self._angles = adapter.rotation.angles(positions[self._left], int(positions[-1]) + 1, like)

    def on_layer(self, queries: LayerQueries) -> None:
        """Add each chunk's shift to the keys and values (1, G, N, D) of its rows that are left."""
        if queries.layer < SECOND_LAYER:
            return
        capture = self._state.kv_cache.capture
        assert capture is not None
        assert capture.kv is not None
        new = capture.kv[queries.layer][:, :, self._moved].float()  # (2, G, k, D)
        stale = [
            found.kv.layer(queries.layer)[:, :, rows]
            for found, rows in zip(self._stale, self._shown, strict=True)
            if found.kv is not None
        ]
        shift = self._by_chunk(new - torch.cat(stale, dim=2).to(new)).to(
            queries.keys.dtype
        )  # (2, G, chunks, D)
        keys, values = shift[:, :, self._left_chunk].split(1)
        queries.keys.index_add_(2, self._left, self._angles.rotate(queries.layer, keys))
        queries.values.index_add_(2, self._left, values)

    def _by_chunk(self, moved: Tensor) -> Tensor:
        """Return the shift of each chunk (2, G, chunks, D), from the movement of the computed rows (2, G, k, D)."""
        mean = moved.mean(dim=2, keepdim=True)
        chunks = len(self._stale)
        sums = moved.new_zeros(*moved.shape[:2], chunks, moved.shape[3])
        sums.index_add_(2, self._moved_chunk, moved - mean)
        counts = torch.bincount(self._moved_chunk, minlength=chunks).to(moved)
        return mean + sums / (counts + self._prior).clamp(min=1)[:, None]
