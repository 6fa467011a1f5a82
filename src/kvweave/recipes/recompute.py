"""Slot 5, recompute: how the selected and fresh rows are run through the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.models.attention import AttentionHook
from kvweave.recipes.state import PrefillState


class Recompute(Protocol):
    """Runs rows and leaves their K,V in the canvas."""

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """Compute prompt positions `rows` (T,), ascending, the last one included; logits (1, vocab) of the last.

        Fresh rows run through all layers in one pass, the last one, which the watches see. Of stale rows others than those in `rows`
        may run too, as long as no more than these are computed on the mean over the layers.
        """
        ...


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """All rows through all layers in one pass: Recompute(T) of the methods page (FusionRAG §3.2, ProphetKV §4.3)."""

    def run(
        self, state: PrefillState, rows: Tensor, hooks: Sequence[AttentionHook], *, capture: bool
    ) -> Tensor:
        """One pass."""
        return state.run(rows, *hooks, capture=capture)
