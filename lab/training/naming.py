"""The train split's world, whose names may be made hard to tell apart."""

import random
from collections.abc import Sequence

from kvweave_lab.eval.splits import TRAIN
from kvweave_lab.eval.world import World

FEW = 2  # endings that the names of one document have


class TrainingWorld(World):
    """A world of the train split.

    Args:
        rng, words: as for World.
    """

    def __init__(self, rng: random.Random, words: Sequence[str]) -> None:
        super().__init__(rng, TRAIN, words)
        self._place: float | None = None  # of the few endings among all, from 0 to 1

    def resemble(self) -> None:
        """From here on names end alike, and only their beginnings tell one from another."""
        self._place = self.rng.random()

    def _composed(self, endings: Sequence[str]) -> str:
        if self._place is not None:
            first = int(self._place * (len(endings) - FEW + 1))
            endings = endings[first : first + FEW]
        return super()._composed(endings)
