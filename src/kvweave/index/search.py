"""Hybrid search in the vector index: a ranking by words (BM25) and one by vectors, combined by reciprocal rank fusion.

Two more rankings are of few chunks: those that hold every word of the question, and those that hold what it quotes word for word,
such as an identifier, which come first. The rankings are filtered before they are fused. So a row that is not
visible takes no rank from a visible one, nor a copied text from another text. A row that has no vector yet gets half of what its
rank by words is worth in place of a rank by vectors.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvweave.index.lance import MatchQuery
from kvweave.index.words import COLUMN, query_words

RANK_OFFSET: Final = 60
"""The constant of reciprocal rank fusion, 1 / (60 + rank), from its paper."""

QUOTE_WEIGHT: Final = 2
"""How much the rank by quotes counts: as much as first ranks by words and by vectors together."""

STAND_IN_WEIGHT: Final = 0.5
"""What a rank by words counts in place of one by vectors: the vector may agree with the words or be far away."""

CANDIDATES_PER_RESULT: Final = 4
MIN_CANDIDATES: Final = 40
_MOST_EQUAL: Final = 1000
"""From this many rows on, it is left to chance which of equal ones are among the candidates."""

_COLUMNS: Final = ["version", "source", "position", "start", "end", "digest", "text"]
_LACKS_VECTOR: Final = "lacks_vector"

Row = dict[str, Any]
Rerank = Callable[[str, Sequence[str]], Sequence[float]]
"""Scores texts for a question; higher is better."""

Fetch = Callable[[int, str | None], list[Row]]


@dataclass(frozen=True, slots=True)
class SearchReason:
    """Why a search found a chunk; None where a ranking does not have it.

    Attributes:
        word_rank: its place by words, from 1.
        bm25: its score by words.
        vector_rank: its place by vectors, from 1.
        cosine: similarity of its vector to the question's, -1..1.
        all_words: whether it holds every word of the question, and few chunks do.
        quotes: what of the question it holds word for word, and few chunks do.
        rerank_score: what the reranking model gave it; None without one.
        lacks_vector: whether it has no vector yet, and was found by its words alone.
    """

    word_rank: int | None = None
    bm25: float | None = None
    vector_rank: int | None = None
    cosine: float | None = None
    all_words: bool = False
    quotes: tuple[str, ...] = ()
    rerank_score: float | None = None
    lacks_vector: bool = False


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
        reason: why it was found; two chunks are equal without it.
    """

    version: str
    source: str
    position: int
    start: int
    end: int
    text: str
    score: float
    reason: SearchReason = field(default=SearchReason(), compare=False)


def hybrid_search(
    table: Any, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
) -> list[FoundChunk]:
    """Return the k best rows, best first; of equal scores those found by words come first, then by source and position.

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
    by_vector = _visible_rows(lambda limit, where: _by_vector(table, vector, limit, where), depth, visible)
    by_words = _visible_rows(lambda limit, where: _by_words(table, question, limit, where), depth, visible)
    by_quotes = _with_quotes(by_words, question, k)
    by_all_words = _with_all_words(by_words, question, k)
    rankings = [by_vector, by_words, by_all_words, *[by_quotes] * QUOTE_WEIGHT]
    scores = fuse_rankings([[row["digest"] for row in ranking] for ranking in rankings])
    lacking = _without_vector(by_words, by_vector)
    for rank, digest in lacking:
        scores[digest] += STAND_IN_WEIGHT / (RANK_OFFSET + rank)
    reasons = _reasons(by_vector, by_words, by_all_words, by_quotes)
    for _, digest in lacking:
        reasons[digest] = replace(reasons[digest], lacks_vector=True)
    rows = _distinct([*by_vector, *by_words])
    found = [_found_chunk(row, scores[row["digest"]], reasons[row["digest"]]) for row in rows]
    return sorted(found, key=_place)[:k]


def _place(chunk: FoundChunk) -> tuple[float, bool, str, int]:
    return -chunk.score, chunk.reason.word_rank is None, chunk.source, chunk.position


def reranked(chunks: Sequence[FoundChunk], question: str, rerank: Rerank) -> list[FoundChunk]:
    """Return chunks in the order of a reranking model, whose scores become theirs."""
    scores = rerank(question, [chunk.text for chunk in chunks])
    scored = [
        replace(chunk, score=score, reason=replace(chunk.reason, rerank_score=score))
        for chunk, score in zip(chunks, scores, strict=True)
    ]
    return sorted(
        scored, key=lambda chunk: -chunk.score
    )  # stable: equal ones stay in the order of the search


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
    only if it found too few rows without one. Which of many equal rows a search returns depends on the moment: more are
    fetched until all that equal the last one kept are there.
    """
    limit, where = 2 * depth, None
    while True:
        rows = fetch(limit, where)
        kept = _distinct(row for row in rows if row["version"] in visible)
        enough = len(kept) >= depth
        if len(rows) < limit or (enough and (limit >= _MOST_EQUAL or _differ(kept[depth - 1], rows[-1]))):
            return kept[:depth]
        limit, where = 4 * limit, where if enough else in_list("version", visible)


def _differ(row: Row, worse: Row) -> bool:
    """Return whether two rows of one ranking have different scores."""
    return any(row[each] != worse[each] for each in ("_score", "_distance") if each in row)


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
    if not has_word_index(table):  # an index of another version that cannot be written to
        return _fetched(
            table.search(MatchQuery(question, "text"), query_type="fts"), limit, where, "_score", -1.0
        )
    words = query_words(question).words
    if not words:
        return []
    query, more = MatchQuery(" ".join(words), COLUMN), [COLUMN]
    return _fetched(table.search(query, query_type="fts"), limit, where, "_score", -1.0, more)


def has_word_index(table: Any) -> bool:
    """Return whether the words of this version are indexed."""
    return any(COLUMN in index.columns for index in table.list_indices())


def _with_all_words(by_words: Sequence[Row], question: str, k: int) -> list[Row]:
    """Return the rows that hold every word of the question, unless they are too many to tell a difference."""
    wanted = query_words(question)
    rows = [row for row in by_words if wanted.all_in(row.get(COLUMN) or "")]
    return rows if len(rows) <= k else []


def _with_quotes(by_words: Sequence[Row], question: str, k: int) -> list[Row]:
    """Return the rows that hold what the question quotes, unless they are too many to tell a difference."""
    wanted = quotes(question)
    rows = [{**row, "quotes": held(wanted, row["text"])} for row in by_words]
    rare = {quote for quote in wanted if 0 < sum(quote in row["quotes"] for row in rows) <= k}
    kept = [{**row, "quotes": tuple(quote for quote in row["quotes"] if quote in rare)} for row in rows]
    held_rows = [row for row in kept if row["quotes"]]
    return sorted(held_rows, key=lambda row: (-len(row["quotes"]), not is_spelled(question, row["text"])))


def _without_vector(by_words: Sequence[Row], by_vector: Sequence[Row]) -> list[tuple[int, str]]:
    """Return the places by words, from 1, and the digests of the rows whose text has no vector in the table."""
    nearest = {row["digest"] for row in by_vector}
    return [
        (rank, row["digest"])
        for rank, row in enumerate(by_words, 1)
        if row[_LACKS_VECTOR] and row["digest"] not in nearest
    ]


def _reasons(
    by_vector: Sequence[Row],
    by_words: Sequence[Row],
    by_all_words: Sequence[Row],
    by_quotes: Sequence[Row],
) -> dict[str, SearchReason]:
    """Return each row's places, by the digest of its text."""
    reasons: dict[str, SearchReason] = defaultdict(SearchReason)
    for rank, row in enumerate(by_vector, 1):  # squared distance of unit vectors
        reasons[row["digest"]] = SearchReason(vector_rank=rank, cosine=1 - row["_distance"] / 2)
    for rank, row in enumerate(by_words, 1):
        digest = row["digest"]
        reasons[digest] = replace(reasons[digest], word_rank=rank, bm25=row["_score"])
    for row in by_all_words:
        reasons[row["digest"]] = replace(reasons[row["digest"]], all_words=True)
    for row in by_quotes:
        reasons[row["digest"]] = replace(reasons[row["digest"]], quotes=row["quotes"])
    return reasons


def _fetched(
    search: Any, limit: int, where: str | None, column: str, sign: float, more: Sequence[str] = ()
) -> list[Row]:
    if where is not None:
        search = search.where(where, prefilter=True)
    columns = {name: name for name in (*_COLUMNS, column, *more)} | {_LACKS_VECTOR: "vector IS NULL"}
    rows: list[Row] = search.select(columns).limit(limit).to_list()
    return sorted(rows, key=lambda row: (sign * row[column], row["source"], row["position"]))


def _found_chunk(row: Row, score: float, reason: SearchReason) -> FoundChunk:
    return FoundChunk(
        version=row["version"],
        source=row["source"],
        position=row["position"],
        start=row["start"],
        end=row["end"],
        text=row["text"],
        score=score,
        reason=reason,
    )


# What a question may quote from a text word for word: identifiers, checksums, quotations, itself

_MOST_LETTERS: Final = 200
_LEAST_DIGITS: Final = 6  # a shorter number is a year, a price or a page
_AROUND: Final = (
    " \t\r\n.,;:!?\"'()[]\u3002\uff1f\uff01\u061f\u00bf\u00a1\u201c\u201d\u2018\u2019\u00ab\u00bb\u300c\u300d"
)
_QUOTED: Final = re.compile(
    r'"([^"]+)"|\u201c([^\u201d]+)\u201d|\u00ab([^\u00bb]+)\u00bb|\u300c([^\u300d]+)\u300d'
)
_WORD: Final = re.compile(r"[^\s\"\u201c\u201d\u00ab\u00bb,;!?()\[\]]+")
_JOINED: Final = re.compile(r"[^\W\d_][_.:/#@-][^\W\d_]|[a-z][A-Z]|_|::")


def quotes(question: str) -> list[str]:
    """Return what a question may quote, each once, without case: first the whole question."""
    text = unicodedata.normalize("NFKC", question)
    quoted = [part for match in _QUOTED.findall(text) for part in match]
    identifiers = [word for word in _WORD.findall(text) if _is_identifier(word.strip(_AROUND))]
    found = (part.strip(_AROUND).casefold() for part in (text, *quoted, *identifiers))
    return list(dict.fromkeys(part for part in found if 1 < len(part) <= _MOST_LETTERS))


def held(wanted: Sequence[str], text: str) -> tuple[str, ...]:
    """Return those of some quotes that a text holds, not as a part of longer words."""
    if not wanted:
        return ()
    plain = unicodedata.normalize("NFKC", text).casefold()
    return tuple(quote for quote in wanted if quote in plain and _as_words(quote).search(plain))


def is_spelled(question: str, text: str) -> bool:
    """Return whether a text holds the whole question with its capitals."""
    return unicodedata.normalize("NFKC", question).strip(_AROUND) in unicodedata.normalize("NFKC", text)


def _is_identifier(word: str) -> bool:
    digits = sum(sign.isdigit() for sign in word)
    letters = any(sign.isalpha() for sign in word)
    return digits >= _LEAST_DIGITS or (digits > 0 and letters and len(word) > 2) or bool(_JOINED.search(word))


def _as_words(quote: str) -> re.Pattern[str]:
    """Return a pattern of a quote that is no part of a longer word, in scripts that have spaces."""
    before = r"(?<![^\W_])" if _needs_edge(quote[0]) else ""
    after = r"(?![^\W_])" if _needs_edge(quote[-1]) else ""
    return re.compile(before + re.escape(quote) + after)


def _needs_edge(sign: str) -> bool:
    return sign.isalnum() and unicodedata.category(sign) != "Lo"
