"""Scores of stale tokens that several methods use."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.models.attention_probe import AttentionProbe
from kvweave.models.last_layer import EndAt
from kvweave.recipes.assembled import Assembled
from kvweave.recipes.record import Record


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """How much the question attends to each token when it is run over the stale KV (ProphetKV §4.2).

    Attention weights of the rows that the user wrote, with a softmax over the context's keys alone, averaged over
    rows, heads and layers. `layers` are those that count, negative ones from the last, None for all.
    """

    layers: tuple[int, ...] | None = None
    adds_up: ClassVar[bool] = True
    records: ClassVar[tuple[Record, ...]] = ()

    def scores(self, scene: Assembled) -> Tensor:
        """One pass up to the attention of the last layer that counts.

        Of the question up to the last row that the user wrote, on which no later row bears, and of chunks without
        stored KV.
        """
        first, _ = scene.context
        all_layers = range(scene.request.adapter.geometry.layers)
        layers = {all_layers[layer] for layer in self.layers or all_layers}
        probe = AttentionProbe(scene.asked, columns=scene.context, layers=layers)
        rows = scene.fresh[scene.fresh <= scene.asked[-1]]
        scene.look(rows, probe, EndAt(max(layers)))
        return probe.weights.mean(dim=0).cpu()[scene.stale - first]
