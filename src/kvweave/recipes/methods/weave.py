"""weave: recompute what the question looks at and what does not stand on its own."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from kvweave.recipes.features import ContextSensitivity, FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.prepare import Previous
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import Highest, QuestionAttention
from kvweave.recipes.state import PrefillState


@dataclass(frozen=True, slots=True)
class AttendedMovement:
    """The question's attention to each stale token, times how far the token's KV moves behind other chunks."""

    attention: QuestionAttention = field(default_factory=QuestionAttention)
    moved: ContextSensitivity = field(default_factory=ContextSensitivity)
    adds_up: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The movement."""
        return (self.moved,)

    def scores(self, state: PrefillState) -> Tensor:
        """The pass that the attention takes, and one note of each stale chunk."""
        return self.attention.scores(state) * self.moved.of_stale(state)


def weave() -> Recipe:
    """Our own: chunks prepared behind what stands before them, selected by attention times movement.

    Paper: none; parts of FusionRAG §3.1 (similar chunks), ProphetKV §4.2 (the question over stale KV) and CacheBlend (how
        far KV is off), put together differently.
    Idea: a token's KV is worth recomputing if the question looks at it and if it would change. What the question looks at is
        known from its attention over stale KV. Whether a token changes cannot be seen then, but before: at indexing time
        each chunk is prefilled behind similar chunks once more, and the tokens that move are those whose meaning lies in
        other text. Of that text, what stands right before the chunk in its document is known, so that chunks are prepared
        behind it.
    Parameters: the chunk before; 10 neighbours to measure movement; ratio 0.1.
    Differs from the paper: nothing to differ from.
    Relations: `following+prophetkv` without the movement, `similar+prophetkv` spends the similar chunks on KV instead.
    Measured: see the methods page; what else was tried, in the experiments. Of the generated tasks, coref, vartrack and half
        of contradiction cut documents where the text goes on, which favours `following`; the others do not.
    """
    return Recipe(
        "weave",
        prepare=Previous(),
        match=MatchPathThenChunk(),
        select=Highest(AttendedMovement()),
        ratio=0.1,
    )
