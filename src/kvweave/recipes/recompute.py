"""Slot 5, recompute: how the selected and fresh rows are run through the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.hooks import AttentionHook
from kvweave.recipes.prefill_state import PrefillState


class Recompute(Protocol):
    """Runs rows through the model and writes their K,V to the KV cache."""

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Compute prompt positions `rows` (T,), ascending, the last one included; return its logits (1, vocab).

        The last pass must run all fresh rows through all layers, with `hooks` on it. Other stale rows than those in `rows`
        may run too, as long as on average over the layers no more stale rows run than `rows` holds. With `capture`,
        `kv_cache.capture` afterwards holds the unrotated KV of the rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """All rows through all layers in one pass: Recompute(T) of the methods page (FusionRAG §3.2, ProphetKV §4.3)."""

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Run one pass."""
        return state.request.adapter.compute(
            state.kv_cache, state.request.prompt.token_ids, state.plan(rows, *hooks), capture=capture
        )
