"""What retrieval does on the benchmark, without a language model: evidence found, and neighbours found together.

A chunk's neighbours are those whose KV the preparation `similar` puts before it. FusionRAG fig. 7a asks how often they are
retrieved together with it; only then can that preparation show the chunk what will stand before it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.natural.library import Library
from kvweave_lab.eval.natural.prompts import found_share, retrieve
from kvweave_lab.eval.natural.questions import Question
from kvweave_lab.statistics import Estimate, interval_over_tasks

DEPTHS: Final = (1, 3, 5, 10, 20)
NEIGHBOURS: Final = (1, 3, 5, 10)

RANKINGS: Final = ("hybrid", "words", "vectors")

_RANKED: Final = 240
"""So many hybrid results hold the first 20 by words and by vectors: 1 / (60 + 20) is more than two places beyond 100 give."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well one way to rank finds the evidence.

    Attributes:
        name: hybrid, words (BM25 alone) or vectors.
        recall: for each of DEPTHS the share of a question's quotes whose chunk is among the first ones.
        mrr: the mean of 1 / the place of the first chunk with a quote; 0 beyond the last of DEPTHS.
    """

    name: str
    recall: tuple[Estimate, ...]
    mrr: Estimate


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """What the contexts of one length hold, over all questions.

    Attributes:
        context_tokens: the length that was asked for.
        tokens: mean length of the chunks.
        chunks: mean number of chunks.
        complete: share of the questions all of whose quotes are in the context.
        evidence: share of a question's quotes that are in the context.
        own: share of the chunks that come from the set's own documents.
        any_together: for each of NEIGHBOURS the share of the chunks with at least one of so many nearest neighbours in the
            same context.
        together: for each of NEIGHBOURS the share of these neighbours that are in the same context.
        by_chance: the share that would be there if the other chunks were drawn at random.
        previous: share of the chunks that are not the first of their document whose previous chunk is there too.
    """

    context_tokens: int
    tokens: float
    chunks: float
    complete: Estimate
    evidence: Estimate
    own: float
    any_together: tuple[Estimate, ...]
    together: tuple[Estimate, ...]
    by_chance: float
    previous: Estimate | None


@dataclass(frozen=True, slots=True)
class ChangeFigures:
    """What a changed document costs, on average over the set's own documents.

    Attributes:
        own: chunks of the document; each is computed again, alone and after its neighbours.
        others: for each of NEIGHBOURS the chunks of other documents with one of these chunks among so many nearest ones. They
            are computed again after their neighbours.
    """

    own: Estimate
    others: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class RetrievalFigures:
    """All of these, with the number of questions and of chunks that are searched."""

    questions: int
    library_chunks: int
    rankings: tuple[Ranking, ...]
    contexts: tuple[ContextFigures, ...]
    change: ChangeFigures


def measure_retrieval(
    library: Library, questions: Sequence[Question], lengths: Iterable[int], progress: Progress = no_progress
) -> RetrievalFigures:
    """Search for every question that has evidence, and for every context length."""
    asked = [question for question in questions if question.evidence]
    placed: dict[str, list[list[int | None]]] = {name: [] for name in RANKINGS}
    for done, question in enumerate(asked, 1):
        for name, places in _places(library, question).items():
            placed[name].append(places)
        progress("questions", done, len(asked))
    rankings = tuple(_ranking(name, places) for name, places in placed.items())
    contexts = tuple(_context(library, asked, length) for length in lengths)
    return RetrievalFigures(len(asked), len(library.chunks), rankings, contexts, _change(library))


def _places(library: Library, question: Question) -> dict[str, list[int | None]]:
    """Return for each way to rank the place of each quote's chunk; None where it is not found."""
    hybrid = library.search(question.text, DEPTHS[-1])
    more = {library.number(found): found.reason for found in library.search(question.text, _RANKED)}
    places: dict[str, dict[int, int | None]] = {
        "hybrid": {library.number(found): place for place, found in enumerate(hybrid, 1)},
        "words": {number: reason.word_rank for number, reason in more.items()},
        "vectors": {number: reason.vector_rank for number, reason in more.items()},
    }
    holders = [library.holder(evidence) for evidence in question.evidence]
    return {name: [own.get(holder) for holder in holders] for name, own in places.items()}


def _ranking(name: str, places: Sequence[Sequence[int | None]]) -> Ranking:
    recall = tuple(
        _mean([np.mean([place is not None and place <= depth for place in own]) for own in places])
        for depth in DEPTHS
    )
    first = [min((place for place in own if place is not None), default=0) for own in places]
    return Ranking(name, recall, _mean([1 / place if 0 < place <= DEPTHS[-1] else 0 for place in first]))


def _context(library: Library, questions: Sequence[Question], length: int) -> ContextFigures:
    contexts = [[library.number(found) for found in retrieve(library, each, length)] for each in questions]
    shares = [
        found_share(library, each, numbers) or 0.0 for each, numbers in zip(questions, contexts, strict=True)
    ]
    near = [[_together(library, number, numbers) for number in numbers] for numbers in contexts]
    before = [[_previous(library, number, numbers) for number in numbers] for numbers in contexts]
    told = [[each for each in own if each is not None] for own in before]
    counts = [len(numbers) for numbers in contexts]
    return ContextFigures(
        context_tokens=length,
        tokens=float(
            np.mean([sum(len(library.chunks[n].token_ids) for n in numbers) for numbers in contexts])
        ),
        chunks=float(np.mean(counts)),
        complete=_mean([share == 1 for share in shares]),
        evidence=_mean(shares),
        own=float(np.mean([np.mean([library.is_own(n) for n in numbers]) for numbers in contexts])),
        any_together=tuple(
            _mean([np.mean([any(own[:count]) for own in chunks]) for chunks in near]) for count in NEIGHBOURS
        ),
        together=tuple(
            _mean([np.mean([np.mean(own[:count]) for own in chunks]) for chunks in near])
            for count in NEIGHBOURS
        ),
        by_chance=float(np.mean([count - 1 for count in counts]) / max(1, len(library.chunks) - 1)),
        previous=_mean([np.mean(own) for own in told if own]) if any(told) else None,
    )


def _change(library: Library) -> ChangeFigures:
    documents = [chunk.document for chunk in library.chunks]
    own = sorted({source for number, source in enumerate(documents) if library.is_own(number)})
    due: dict[str, list[set[int]]] = {source: [set() for _ in NEIGHBOURS] for source in own}
    for number, source in enumerate(documents):
        nearest = [documents[near] for near in library.nearest(number, NEIGHBOURS[-1])]
        for place, count in enumerate(NEIGHBOURS):
            for near in set(nearest[:count]) & due.keys() - {source}:
                due[near][place].add(number)
    return ChangeFigures(
        own=_mean([documents.count(source) for source in own]),
        others=tuple(_mean([len(due[source][place]) for source in own]) for place in range(len(NEIGHBOURS))),
    )


def _together(library: Library, number: int, context: Sequence[int]) -> list[bool]:
    """Return whether each of a chunk's nearest neighbours, the nearest first, is in the context."""
    return [near in context for near in library.nearest(number, NEIGHBOURS[-1])]


def _previous(library: Library, number: int, context: Sequence[int]) -> bool | None:
    """Return whether the chunk before this one in its document is in the context; None for a document's first chunk."""
    if not number or library.chunks[number - 1].document != library.chunks[number].document:
        return None
    return number - 1 in context


def _mean(values: Sequence[float | np.floating]) -> Estimate:
    return interval_over_tasks([[float(value) for value in values]])
