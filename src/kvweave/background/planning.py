"""Chooses the next job of question prediction from what is stored. Runs no job.

A job's result changes what is stored, so an interrupted or killed process continues by asking for the next job again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.predictions import ChunkRef, PredictionStore, SummaryPart

ROUNDS_PER_PART: Final = 2
"""Rounds of predictions from each part of the summary (PerCache §5.3)."""


@dataclass(frozen=True, slots=True)
class Summarise:
    """Summarise a batch of chunks, in reading order, as a new part of the summary."""

    chunks: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class PredictFromDocuments:
    """Predict from the summary, with `part` first."""

    part: SummaryPart
    others: tuple[SummaryPart, ...]


@dataclass(frozen=True, slots=True)
class PredictFromHistory:
    """Predict from earlier questions, oldest first, and the summary's parts; `number` is the latest question's."""

    earlier: tuple[str, ...]
    parts: tuple[SummaryPart, ...]
    number: int


Job = Summarise | PredictFromDocuments | PredictFromHistory


def next_job(
    predictions: PredictionStore,
    chunks: Sequence[ChunkRef],
    batch_tokens: Callable[[], int],
    max_earlier: Callable[[], int],
) -> Job | None:
    """Return the next job, or None: first new questions, then the latest part's first round, then the next part.

    Later rounds wait until every chunk had one, and documents take turns: idle time may end at any moment, and what is predicted
    by then should be about all of them.

    `batch_tokens` and `max_earlier` depend on the model, and calling them may load it. They are called only if needed.

    Args:
        predictions: what is stored.
        chunks: all listed chunks, in reading order.
        batch_tokens: returns the most tokens to summarise at once; a single chunk may have more.
        max_earlier: returns the most questions of the history to predict from.
    """
    parts = predictions.summary.parts()
    if parts and predictions.history.has_new:
        number = predictions.history.last
        earlier = tuple(predictions.history.recent(max_earlier()))
        return PredictFromHistory(earlier, tuple(reversed(parts)), number)
    part = min(parts, key=lambda each: (each.rounds, each.id), default=None)
    missing = predictions.summary.missing(chunks) if part is None or part.rounds else []
    if missing:
        return Summarise(_batch(chunks, missing, batch_tokens()))
    if part is None or part.rounds >= ROUNDS_PER_PART:
        return None
    return PredictFromDocuments(part, tuple(other for other in reversed(parts) if other.id != part.id))


def _batch(chunks: Sequence[ChunkRef], missing: Sequence[ChunkRef], max_tokens: int) -> tuple[ChunkRef, ...]:
    """Return missing chunks in reading order, the first ones of the document of which least is covered."""
    left = set(missing)
    covered = Counter(chunk.version for chunk in chunks if chunk not in left)
    first = min(missing, key=lambda chunk: covered[chunk.version])
    batch: list[ChunkRef] = []
    for chunk in missing[missing.index(first) :]:
        if batch and sum(each.tokens for each in batch) + chunk.tokens > max_tokens:
            break
        batch.append(chunk)
    return tuple(batch)
