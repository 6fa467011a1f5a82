"""What to predict next, as jobs: one at a time, from what is written down. Runs none of them itself.

Each job's outcome changes what is written down, so that whoever is stopped, or killed, goes on by asking again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvweave.predict.store import ChunkName, Part, PredictionStore

KNOWLEDGE_ROUNDS: Final = 2
"""Rounds of predictions from each part of the abstract (PerCache §5.3)."""


@dataclass(frozen=True, slots=True)
class SumUp:
    """Sum up a batch of chunks, in reading order, as a new part of the abstract."""

    chunks: tuple[ChunkName, ...]


@dataclass(frozen=True, slots=True)
class FromKnowledge:
    """Predict from the abstract with this part first; `round` counts the part's rounds, from 0."""

    part: Part
    others: tuple[Part, ...]

    @property
    def round(self) -> int:
        """Which of the part's rounds it is."""
        return self.part.rounds


@dataclass(frozen=True, slots=True)
class FromHistory:
    """Predict from recent questions, the oldest first, over these parts; `number` is the latest question's."""

    earlier: tuple[str, ...]
    parts: tuple[Part, ...]
    number: int


Job = SumUp | FromKnowledge | FromHistory


def next_job(
    predictions: PredictionStore,
    chunks: Sequence[ChunkName],
    batch_tokens: Callable[[], int],
    most_earlier: Callable[[], int],
) -> Job | None:
    """What is due: what follows from new questions, then from new parts, then the next part; None if nothing is.

    Args:
        outlook: what is written down.
        chunks: all listed chunks, in reading order.
        batch_tokens: gives how many tokens of chunks are summed up at once, if there is more than one chunk.
        most_earlier: gives how many questions of the history at most.

    Both depend on the model, which may have to be loaded for them: they are called only where a job needs them.
    """
    parts = predictions.abstract.parts()
    if parts and predictions.history.has_news:
        number = predictions.history.last
        return FromHistory(tuple(predictions.history.recent(most_earlier())), tuple(reversed(parts)), number)
    due = [part for part in parts if part.rounds < KNOWLEDGE_ROUNDS]
    if due:
        part = min(due, key=lambda each: (each.rounds, each.id))
        others = tuple(other for other in reversed(parts) if other.id != part.id)
        return FromKnowledge(part, others)
    lacking = predictions.abstract.lacking(chunks)
    return SumUp(_batch(lacking, batch_tokens())) if lacking else None


def _batch(chunks: Sequence[ChunkName], most_tokens: int) -> tuple[ChunkName, ...]:
    taken: list[ChunkName] = []
    for chunk in chunks:
        if taken and sum(each.tokens for each in taken) + chunk.tokens > most_tokens:
            break
        taken.append(chunk)
    return tuple(taken)


Extent: TypeAlias = Literal["prefill", "answer"]


def extent(threshold: float, cutoff: float) -> Extent:
    """With τ above the cutoff few questions will be near enough to a stored one, and decoding would be in vain.

    Args:
        threshold: τ, the least similarity of questions that share an answer, 0..1.
        cutoff: the highest τ at which answers are computed ahead, 0..1.
    """
    return "answer" if threshold <= cutoff else "prefill"
