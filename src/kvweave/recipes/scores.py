"""Scores of stale tokens that several methods use."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvweave.models.attention_probe import AttentionProbe
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
        """One pass of the question, and of chunks without stored KV, through all layers."""
        first, _ = scene.context
        layers = None
        if self.layers is not None:
            layers = {layer % scene.request.adapter.geometry.layers for layer in self.layers}
        probe = AttentionProbe(scene.asked, columns=scene.context, layers=layers)
        scene.run(scene.fresh, probe)
        return probe.weights.mean(dim=0).cpu()[scene.stale - first]
