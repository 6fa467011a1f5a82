"""A further turn of a text that is held: a prompt on a canvas of its own, whose rows attend to the text, and then join it.

So stored KV is placed and recomputed there as in any prompt, one layer at a time. Knows nothing of recipes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.decode.retrieved_kv import RetrievedKV
from kvweave.models.adapter import Adapter
from kvweave.models.attention import AttentionCall, LayerQueries, RowPlan


class Appending:
    """Puts a turn behind `held`, which holds all of `token_ids` and begins with the system prefix `prefix`.

    What `models.earlier_text` and `models.layer_taker` ask for, for one prefill. A step's budget and the bound of memory are
    those of `held`, which cannot be used any more if a pass fails that has begun to hand its layers over.
    """

    bounded = True

    def __init__(
        self, adapter: Adapter, held: RetrievedKV, token_ids: Sequence[int], prefix: Sequence[int]
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

    def __init__(self, held: RetrievedKV, rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._held = held

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); keys and values of the call are the prompt's."""
        self.show(call)
        return self._held.attend_behind(call, self.rows)
