"""Slot 5, recompute: stale rows that are not recomputed are shifted as the recomputed rows of their chunk have moved.

Other text before a chunk moves the keys and values of all its tokens in a common direction, beside what it does to each of them. Rows
that are evenly spaced show that direction; rows that the question attends to move otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.hooks import AttentionHook, LayerQueries
from kvweave.recipes.prefill_state import SECOND_LAYER, PrefillState
from kvweave.recipes.recipe import Recompute


@dataclass(frozen=True, slots=True)
class ShiftedRows(Recompute):
    """All rows through all layers in one pass, which also shifts the stale rows that it does not compute.

    In each layer, before the pass' rows attend, the mean movement of a chunk's recomputed rows is added to its other stale
    rows. Keys move as they are before rotation. The mean is over the rows that the selection has spaced evenly. It is pulled
    towards that of all chunks: with k such rows it counts k / (k + `prior`).
    """

    prior: float = 10.0
    writes_reused: ClassVar[bool] = True

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        shift = _Shift(state, rows, self.prior)
        own: list[AttentionHook] = [shift] if shift.has_rows else []
        return state.request.adapter.compute(
            state.kv_cache,
            state.request.prompt.token_ids,
            state.plan(rows, *own, *hooks),
            capture=capture,
            unrotated=bool(own),
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
        shown = torch.isin(state.stale, torch.cat([rows[:0], *state.spaced])) & computed
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
        computed = torch.searchsorted(queries.rows, self._moved)
        new = torch.cat(capture.layer_kv)[:, :, computed].float()  # (2, G, k, D)
        stale = [
            found.kv.layer(queries.layer)[:, :, rows].to(new)
            for found, rows in zip(self._stale, self._shown, strict=True)
            if found.kv is not None and rows.numel()
        ]
        shift = self._by_chunk(new - torch.cat(stale, dim=2)).to(queries.keys.dtype)  # (2, G, chunks, D)
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
