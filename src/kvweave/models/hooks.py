"""How much chosen rows of a pass attend to each key, taken from the queries and keys of the running model.

A probe watches a row plan; the pass itself stays as it is and its output bit-identical. Cost and memory go
with the rows asked for, not with the rows computed. Knows nothing of what the rows are.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import LayerQueries
from kvweave.ops.scores import attention_shares, mean_attention, peak_attention


class AttentionProbe:
    """Records softmax weights of rows on keys, per layer, averaged over rows and query heads.

    Sees what attention sees: grouped heads, sliding windows and soft caps are the layer's own. Watches one pass:

        plan = adapter.rows(rows)
        plan.watches.append(probe)
        adapter.compute(canvas, token_ids, plan)
        probe.weights

    Args:
        rows: prompt positions (R,), a subset of those that the pass computes.
        columns: (first, end) of the prompt positions that the softmax runs over, and that are recorded; None for
            all that a row sees. With the context's bounds neither system prompt nor question takes part, so that
            a layer whose heads rest on the first token counts as much as the others (ProphetKV eq. 7).
        layers: which layers to look at; None for all. The others cost nothing.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        columns: tuple[int, int] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        self._rows = rows
        self._columns = columns
        self._layers = layers
        self._places: Tensor | None = None
        self._seen: dict[int, Tensor] = {}

    def see(self, queries: LayerQueries) -> None:
        """Record one layer; raises InvalidRequest if the pass does not compute a row that was asked for."""
        if self._layers is not None and queries.layer not in self._layers:
            return
        if self._places is None:
            self._places = places_of(self._rows.to(queries.rows.device), queries.rows)
        self._seen[queries.layer] = mean_attention(
            queries.query[:, :, self._places],  # (1, H, R, D)
            queries.rows[self._places],
            queries.keys,
            scaling=queries.scaling,
            window=queries.window,
            softcap=queries.softcap,
            columns=self._columns,
        )[0]

    @property
    def weights(self) -> Tensor:
        """(L, keys) float32 on the model's device: the layers looked at, in order; call it after the pass."""
        return torch.stack([self._seen[layer] for layer in sorted(self._seen)])


def places_of(rows: Tensor, computed: Tensor) -> Tensor:
    """Where each of `rows` stands among the ascending rows that a pass computes.

    Raises InvalidRequest if the pass does not compute one of them.
    """
    places = torch.searchsorted(computed, rows).clamp_(max=max(0, computed.numel() - 1))
    if rows.numel() and (computed.numel() == 0 or not torch.equal(computed[places], rows)):
        missing = rows[~torch.isin(rows, computed)].tolist()
        raise InvalidRequest(
            f"rows {missing[:5]} are to be watched, but this pass does not compute them; watch rows of the pass"
        )
    return places


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


class UnrotatedQueries:
    """Keeps the queries of chosen layers, unrotated, of all rows of one pass:

        queries = UnrotatedQueries(layers={last})
        plan.watches.append(queries)
        adapter.compute(canvas, token_ids, plan)
        queries.of(last)

    Whole heads, whatever part of them the family turns; layers without positions give their queries as they are.
    """

    wants_unrotated = True

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = frozenset(layers)
        self._seen: dict[int, Tensor] = {}

    def see(self, queries: LayerQueries) -> None:
        """Keep one layer's queries."""
        if queries.layer in self._layers:
            assert queries.unrotated is not None
            self._seen[queries.layer] = queries.unrotated

    def of(self, layer: int) -> Tensor:
        """(1, H, T, D), one for each row of the pass; raises InvalidRequest for a layer that was not looked at."""
        if layer not in self._seen:
            raise InvalidRequest(
                f"layer {layer} was not looked at: the pass ran layers {sorted(self._seen)} of those asked for"
            )
        return self._seen[layer]
