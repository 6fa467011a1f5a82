"""How the attention of chosen rows divides among parts of the prompt, and which keys get the most of it.

Both watch one pass, as an AttentionProbe does, and keep what they need of every layer. They know nothing of what
rows and parts are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.models.attention import LayerQueries
from kvweave.models.attention_probe import places_of
from kvweave.ops.scores import attention_shares, peak_attention


class AttentionShares:
    """Records the share of each row's attention that goes to each part of the prompt, averaged over layers and heads.

    Args:
        rows: prompt positions (R,), a subset of those that the pass computes.
        parts: (start, end) of each part's prompt positions.
    """

    def __init__(self, rows: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        self._rows = rows
        self._parts = parts
        self._sum: Tensor | None = None
        self._layers = 0

    def see(self, queries: LayerQueries) -> None:
        """Add one layer; raises InvalidRequest if the pass does not compute a row that was asked for."""
        places = places_of(self._rows.to(queries.rows.device), queries.rows)
        among = torch.zeros(queries.keys.shape[2], len(self._parts), device=queries.keys.device)
        for number, (start, end) in enumerate(self._parts):
            among[start:end, number] = 1.0
        found = attention_shares(
            queries.query[:, :, places],
            queries.rows[places],
            queries.keys,
            among,
            scaling=queries.scaling,
            window=queries.window,
            softcap=queries.softcap,
        )[0]
        self._sum = found if self._sum is None else self._sum + found
        self._layers += 1

    @property
    def shares(self) -> Tensor:
        """(R, parts) float32 on the model's device; call it after the pass."""
        assert self._sum is not None, "the pass has not run"
        return self._sum / self._layers


class PeakAttention:
    """Records the largest weight that any row, head and layer of a pass puts on each key (KVzip's importance)."""

    def __init__(self) -> None:
        self._peak: Tensor | None = None

    def see(self, queries: LayerQueries) -> None:
        """Take one layer in."""
        found = peak_attention(
            queries.query,
            queries.rows,
            queries.keys,
            scaling=queries.scaling,
            window=queries.window,
            softcap=queries.softcap,
        )[0]
        self._peak = found if self._peak is None else torch.maximum(self._peak, found)

    @property
    def weights(self) -> Tensor:
        """(keys,) float32 on the model's device; call it after the pass."""
        assert self._peak is not None, "the pass has not run"
        return self._peak
