"""Hybrid search in the vector index: a ranking by words (BM25) and one by vectors, combined by reciprocal rank fusion.

Both rankings are filtered before they are fused. So a row that is not visible takes no rank from a visible one, nor a
copied text from another text.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvweave.index.lance import MatchQuery

RANK_OFFSET: Final = 60
"""The constant of reciprocal rank fusion, 1 / (60 + rank), from its paper."""

CANDIDATES_PER_RESULT: Final = 4
MIN_CANDIDATES: Final = 40

_COLUMNS: Final = ["version", "source", "position", "start", "end", "digest", "text"]

Row = dict[str, Any]
Fetch = Callable[[int, str | None], list[Row]]


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk that a search found.

    Attributes:
        version: of its document.
        source: its document.
        position: its number in the document, from 0.
        start: character offset into the document's text.
        end: character offset into the document's text.
        text: the chunk's text.
        score: fused rank score; higher is better, comparable within one search only.
    """

    version: str
    source: str
    position: int
    start: int
    end: int
    text: str
    score: float


def hybrid_search(
    table: Any, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
) -> list[FoundChunk]:
    """Return the k best rows, best first; equal scores are ordered by source and position.

    Of chunks with the same tokens (copied files) only the best-ranked one takes part: k results are k texts.

    Args:
        table: the LanceDB table.
        question: the words to match. Any text: it is not parsed as a query language.
        vector: the question's vector, (dimensions,).
        k: most results.
        visible: versions whose rows count.
    """
    if not visible or k < 1:
        return []
    depth = max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * k)
    rankings = [
        _visible_rows(lambda limit, where: _by_vector(table, vector, limit, where), depth, visible),
        _visible_rows(lambda limit, where: _by_words(table, question, limit, where), depth, visible),
    ]
    rows = _distinct(row for ranking in rankings for row in ranking)
    scores = fuse_rankings([[row["digest"] for row in ranking] for ranking in rankings])
    found = [_found_chunk(row, scores[row["digest"]]) for row in rows]
    return sorted(found, key=lambda chunk: (-chunk.score, chunk.source, chunk.position))[:k]


def nearest_texts(table: Any, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]) -> list[str]:
    """Return the k different texts nearest to a vector (dimensions,), nearest first, from rows of visible versions."""
    if not visible or k < 1:
        return []
    rows = _visible_rows(lambda limit, where: _by_vector(table, vector, limit, where), k, visible)
    return [row["text"] for row in rows]


def fuse_rankings(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """Return each name's score: the sum of 1 / (60 + rank), rank from 1, over the rankings."""
    scores: dict[str, float] = defaultdict(float)
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            scores[name] += 1 / (RANK_OFFSET + rank)
    return dict(scores)


def in_list(column: str, values: Iterable[str]) -> str:
    """Return an SQL condition: the column has one of the values."""
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in sorted(values))
    return f"{column} IN ({quoted})"


def _visible_rows(fetch: Fetch, depth: int, visible: Collection[str]) -> list[Row]:
    """Return the best `depth` visible rows of one ranking, each text once.

    Usually every row is visible, and a long filter costs more than the search. So the filter is added to the search
    only if it found too few rows without one.
    """
    limit, where = 2 * depth, None
    while True:
        rows = fetch(limit, where)
        kept = _distinct(row for row in rows if row["version"] in visible)
        if len(kept) >= depth or len(rows) < limit:
            return kept[:depth]
        limit, where = 4 * limit, in_list("version", visible)


def _distinct(rows: Iterable[Row]) -> list[Row]:
    """Return the first row of each text: files are copied, and two processes may add one document at a time."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["digest"], row)
    return list(first.values())


def _by_vector(table: Any, vector: npt.NDArray[np.float32], limit: int, where: str | None) -> list[Row]:
    search = table.search(vector, query_type="vector", vector_column_name="vector").distance_type("l2")
    # Unit vectors: the order by distance is the order by cosine, and a zero vector is no special case.
    return _fetched(search, limit, where, "_distance", 1.0)


def _by_words(table: Any, question: str, limit: int, where: str | None) -> list[Row]:
    return _fetched(
        table.search(MatchQuery(question, "text"), query_type="fts"), limit, where, "_score", -1.0
    )


def _fetched(search: Any, limit: int, where: str | None, column: str, sign: float) -> list[Row]:
    if where is not None:
        search = search.where(where, prefilter=True)
    rows: list[Row] = search.select([*_COLUMNS, column]).limit(limit).to_list()
    return sorted(rows, key=lambda row: (sign * row[column], row["source"], row["position"]))


def _found_chunk(row: Row, score: float) -> FoundChunk:
    return FoundChunk(
        version=row["version"],
        source=row["source"],
        position=row["position"],
        start=row["start"],
        end=row["end"],
        text=row["text"],
        score=score,
    )
