"""The train split's world, whose names may be similar to each other."""

import random
from collections.abc import Sequence

from kvweave_lab.eval.world import TRAIN, World

SIMILAR_ENDINGS = 2  # the number of endings of a document's names


class TrainingWorld(World):
    """A world of the train split.

    Args:
        rng, words: as for World.
    """

    def __init__(self, rng: random.Random, words: Sequence[str]) -> None:
        super().__init__(rng, TRAIN, words)
        self._position: float | None = None  # of the chosen endings among all, 0..1

    def use_similar_names(self) -> None:
        """Make later names share a few endings, so that only their beginnings distinguish them."""
        self._position = self.rng.random()

    def _composed(self, endings: Sequence[str]) -> str:
        if self._position is not None:
            first = int(self._position * (len(endings) - SIMILAR_ENDINGS + 1))
            endings = endings[first : first + SIMILAR_ENDINGS]
        return super()._composed(endings)
