"""Queries as they are before rotary positions are applied, for scores that ignore where tokens stand.

Multiplied with stored keys, which are kept before rotation too, they tell how well a token's content answers
the question's (FusionRAG §3.2). Knows nothing of keys or scores.
"""

from collections.abc import Collection

from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.models.attention import LayerQueries


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
