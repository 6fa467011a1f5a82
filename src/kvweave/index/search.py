"""Hybrid search over the bank's table: BM25 and vectors, each its own ranking, fused by reciprocal rank.

Only rows of visible versions take part, so both rankings are filtered before they are fused: an invisible
row must not cost a visible one its rank, nor a copy of a text another text's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lancedb.query import MatchQuery

from kvweave.index.documents import document_id, row_id
from kvweave.types import Chunk

FOUND_COLUMNS = ["version", "source", "position", "start", "end", "digest", "text"]


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk that a search found.

    `version` is its document's, `start`/`end` are character offsets into the document's text. `score` is the fused
    rank score: higher is better, comparable only within one search.
    """

    version: str
    source: str
    position: int
    start: int
    end: int
    text: str
    score: float


def table_schema(dimensions: int) -> pa.Schema:
    """The Arrow schema for vectors of this length."""
    return pa.schema(
        [
            pa.field("row_id", pa.string(), nullable=False),
            pa.field("version", pa.string(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("start", pa.int64(), nullable=False),
            pa.field("end", pa.int64(), nullable=False),
            pa.field("digest", pa.string(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("written_s", pa.float64(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions), nullable=False),
        ]
    )


def versions_and_positions(chunks: Iterable[Chunk]) -> list[tuple[str, int]]:
    """Each chunk's document version and its number there: chunks of one document come in reading order."""
    counts: Counter[str] = Counter()
    places = []
    for chunk in chunks:
        version = document_id(chunk.document, chunk.document_digest)
        places.append((version, counts[version]))
        counts[version] += 1
    return places


def arrow_table(
    chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32], written_s: float, schema: pa.Schema
) -> pa.Table:
    """An Arrow table of the chunks; vectors has shape (chunks, dimensions), `written_s` is now since the epoch."""
    places = versions_and_positions(chunks)
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
    columns = {
        "row_id": [row_id(version, position) for version, position in places],
        "version": [version for version, _ in places],
        "source": [chunk.document for chunk in chunks],
        "position": [position for _, position in places],
        "start": [chunk.start for chunk in chunks],
        "end": [chunk.end for chunk in chunks],
        "digest": [chunk.digest for chunk in chunks],
        "text": [chunk.text for chunk in chunks],
        "written_s": [written_s] * len(chunks),
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
    }
    return pa.table(columns, schema=schema)


RANK_OFFSET = 60
"""The constant of reciprocal rank fusion, 1 / (60 + rank), from its paper."""

CANDIDATES_PER_RESULT = 4
MIN_CANDIDATES = 40

Row = dict[str, Any]
Fetch = Callable[[int, str | None], list[Row]]


def hybrid_search(
    table: Any, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
) -> list[FoundChunk]:
    """The k best rows, best first; equal scores in the order of source and position.

    Of chunks with the same tokens (copied files) only the best-ranked one takes part: k results are k texts.

    Args:
        table: the LanceDB table.
        question: the words to match. Any text: it is not parsed as a query language.
        vector: the question's vector, (dimensions,).
        k: how many at most.
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
    found = [_found(row, scores[row["digest"]]) for row in rows]
    return sorted(found, key=lambda one: (-one.score, one.source, one.position))[:k]


def nearest_texts(table: Any, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]) -> list[str]:
    """The k different texts nearest to a vector by meaning alone, nearest first; arguments as above."""
    if not visible or k < 1:
        return []
    rows = _visible_rows(lambda limit, where: _by_vector(table, vector, limit, where), k, visible)
    return [row["text"] for row in rows]


def fuse_rankings(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """Reciprocal rank fusion: each name scores the sum of 1 / (60 + rank), rank from 1, over the rankings."""
    scores: dict[str, float] = defaultdict(float)
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            scores[name] += 1 / (RANK_OFFSET + rank)
    return dict(scores)


def in_list(column: str, values: Iterable[str]) -> str:
    """An SQL condition: the column has one of the values."""
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in sorted(values))
    return f"{column} IN ({quoted})"


def _visible_rows(fetch: Fetch, depth: int, visible: Collection[str]) -> list[Row]:
    """The best `depth` visible rows of one ranking, each text once.

    Usually nothing is invisible, and a long filter costs more than the search; so the filter goes into the
    search only when the rows found without it were not enough.
    """
    limit, where = 2 * depth, None
    while True:
        rows = fetch(limit, where)
        kept = _distinct(row for row in rows if row["version"] in visible)
        if len(kept) >= depth or len(rows) < limit:
            return kept[:depth]
        limit, where = 4 * limit, in_list("version", visible)


def _distinct(rows: Iterable[Row]) -> list[Row]:
    """The first row of each text: of copied files, or of one document that two processes added at a time."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["digest"], row)
    return list(first.values())


def _by_vector(table: Any, vector: npt.NDArray[np.float32], limit: int, where: str | None) -> list[Row]:
    search = table.search(vector, query_type="vector", vector_column_name="vector").distance_type("l2")
    # Unit vectors: the order by distance is that by cosine, and a zero vector is no special case.
    return _fetched(search, limit, where, "_distance", 1.0)


def _by_words(table: Any, question: str, limit: int, where: str | None) -> list[Row]:
    return _fetched(
        table.search(MatchQuery(question, "text"), query_type="fts"), limit, where, "_score", -1.0
    )


def _fetched(search: Any, limit: int, where: str | None, column: str, sign: float) -> list[Row]:
    if where is not None:
        search = search.where(where, prefilter=True)
    rows: list[Row] = search.select([*FOUND_COLUMNS, column]).limit(limit).to_list()
    return sorted(rows, key=lambda row: (sign * row[column], row["source"], row["position"]))


def _found(row: Row, score: float) -> FoundChunk:
    return FoundChunk(
        version=row["version"],
        source=row["source"],
        position=row["position"],
        start=row["start"],
        end=row["end"],
        text=row["text"],
        score=score,
    )
