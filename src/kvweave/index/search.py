"""Hybrid search in the vector index: a ranking by words (BM25) and one by vectors, combined by reciprocal rank fusion.

Two more rankings have few chunks: those that contain every word of the question, and those that contain a quotation or an identifier
from the question literally. Rows that are not visible, and copies of a text, are removed before the rankings are fused, so they take
no ranks. A row that has no vector yet gets half of the score of its rank by words in place of a score by vectors.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from lancedb.query import MatchQuery

from kvweave.index.words import COLUMN, query_words
from kvweave.results import SearchReason

RANK_OFFSET: Final = 60
"""The constant of reciprocal rank fusion, 1 / (60 + rank), from its paper."""

QUOTE_WEIGHT: Final = 2
"""Weight of the ranking by quotes: a first rank counts as much as first ranks by words and by vectors together."""

STAND_IN_WEIGHT: Final = 0.5
"""Weight of the rank by words where a vector is missing: it might have agreed with the words or not."""

CANDIDATES_PER_RESULT: Final = 4
MIN_CANDIDATES: Final = 40
_MOST_EQUAL: Final = 1000
"""With this many rows, the search no longer fetches all rows that are equal to the last one."""

_COLUMNS: Final = ["version", "source", "position", "start", "end", "digest", "text"]
_LACKS_VECTOR: Final = "lacks_vector"

Row = dict[str, Any]
Rerank = Callable[[str, Sequence[str]], Sequence[float]]
"""Scores texts for a question; higher is better."""

Fetch = Callable[[int, str | None], list[Row]]


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk that a search found: from `start` to `end` in the text of a document's version, in characters.

    `score` is the fused rank score: higher is better, comparable within one search only. `reason` is ignored when chunks are
    compared.
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
    """Return the k best chunks, best first; arguments as for `VectorIndex.search`.

    Operators of query languages have no meaning in a question. Among equal scores, chunks found by words come first; then source
    and position decide. Of chunks with the same tokens (copied files) only the best takes part, so k results are k texts.
    """
    if not visible or k < 1:
        return []
    depth = max(MIN_CANDIDATES, CANDIDATES_PER_RESULT * k)
    by_vector = _visible_rows(partial(_by_vector, table, vector), depth, visible)
    by_words = _visible_rows(partial(_by_words, table, question), depth, visible)
    by_quotes = _with_quotes(by_words, question, k)
    by_all_words = _with_all_words(by_words, question, k)
    rankings = [by_vector, by_words, by_all_words, *[by_quotes] * QUOTE_WEIGHT]
    scores = fuse_rankings([[row["digest"] for row in ranking] for ranking in rankings])
    reasons = _reasons(by_vector, by_words, by_all_words, by_quotes)
    for rank, digest in _without_vector(by_words, by_vector):
        scores[digest] += STAND_IN_WEIGHT / (RANK_OFFSET + rank)
        reasons[digest] = replace(reasons[digest], lacks_vector=True)
    found = []
    for row in _distinct([*by_vector, *by_words]):
        chunk = {name: row[name] for name in _COLUMNS if name != "digest"}
        found.append(FoundChunk(**chunk, score=scores[row["digest"]], reason=reasons[row["digest"]]))
    found.sort(key=lambda each: (-each.score, each.reason.word_rank is None, each.source, each.position))
    return found[:k]


def reranked(chunks: Sequence[FoundChunk], question: str, rerank: Rerank) -> list[FoundChunk]:
    """Return the chunks in the order of a reranking model, with its scores."""
    scores = rerank(question, [chunk.text for chunk in chunks])
    scored = [
        replace(chunk, score=score, reason=replace(chunk.reason, rerank_score=score))
        for chunk, score in zip(chunks, scores, strict=True)
    ]
    return sorted(scored, key=lambda chunk: -chunk.score)  # stable: equal chunks keep their order


def nearest_texts(table: Any, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]) -> list[str]:
    """Return the k different texts nearest to a vector (dimensions,), nearest first, from rows of visible versions."""
    if not visible or k < 1:
        return []
    return [row["text"] for row in _visible_rows(partial(_by_vector, table, vector), k, visible)]


def fuse_rankings(rankings: Iterable[Sequence[str]]) -> dict[str, float]:
    """Return the score of each name: the sum of 1 / (60 + rank) over the rankings, with ranks from 1."""
    scores: dict[str, float] = defaultdict(float)
    for ranking in rankings:
        for rank, name in enumerate(ranking, 1):
            scores[name] += 1 / (RANK_OFFSET + rank)
    return dict(scores)


def in_list(column: str, values: Iterable[str]) -> str:
    """Return an SQL condition that is true if the column has one of the values."""
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in sorted(values))
    return f"{column} IN ({quoted})"


def _visible_rows(fetch: Fetch, depth: int, visible: Collection[str]) -> list[Row]:
    """Return the best `depth` visible rows of one ranking, each text once.

    A long filter takes more time than the search, and usually every row is visible. So the search runs without a filter
    first, and with one only if it found too few visible rows. LanceDB returns any of equal rows, so more rows are fetched
    until all rows that are equal to the last one kept are there.
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
    """Return the first row of each text. A text has several if files were copied, or two processes added a document."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["digest"], row)
    return list(first.values())


def _by_vector(table: Any, vector: npt.NDArray[np.float32], limit: int, where: str | None) -> list[Row]:
    search = table.search(vector, query_type="vector", vector_column_name="vector").distance_type("l2")
    # Vectors have length 1, so distance orders them as cosine does; it is also defined for a zero vector.
    return _fetched(search, limit, where, "_distance", 1.0)


def _by_words(table: Any, question: str, limit: int, where: str | None) -> list[Row]:
    words, column = " ".join(query_words(question).words), COLUMN
    if not has_word_index(table):  # another version's index in a folder that cannot be written to
        words, column = question, "text"
    if not words:
        return []
    search = table.search(MatchQuery(words, column), query_type="fts")
    return _fetched(search, limit, where, "_score", -1.0, [column])


def has_word_index(table: Any) -> bool:
    """Return whether the table has an index of `COLUMN`, the words as this version of kvweave cuts them."""
    return any(COLUMN in index.columns for index in table.list_indices())


def _with_all_words(by_words: Sequence[Row], question: str, k: int) -> list[Row]:
    """Return the rows that contain every word of the question, or no rows if more than k do."""
    wanted = query_words(question)
    rows = [row for row in by_words if wanted.all_in(row.get(COLUMN) or "")]
    return rows if len(rows) <= k else []


def _with_quotes(by_words: Sequence[Row], question: str, k: int) -> list[Row]:
    """Return the rows that contain quotes of the question, each with those quotes that at most k rows contain."""
    wanted = quotes(question)
    rows = [{**row, "quotes": held(wanted, row["text"])} for row in by_words]
    rare = {quote for quote in wanted if 0 < sum(quote in row["quotes"] for row in rows) <= k}
    kept = [{**row, "quotes": tuple(quote for quote in row["quotes"] if quote in rare)} for row in rows]
    held_rows = [row for row in kept if row["quotes"]]
    return sorted(held_rows, key=lambda row: (-len(row["quotes"]), not is_spelled(question, row["text"])))


def _without_vector(by_words: Sequence[Row], by_vector: Sequence[Row]) -> list[tuple[int, str]]:
    """Return the ranks by words, from 1, and the digests of the rows whose text has no vector in the table."""
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
    """Return the reason for each row, by the digest of its text."""
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


# Quotes: the parts of a question that a text may contain literally, such as identifiers, checksums and quotations

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
    """Return the quotes of a question in lower case, each once; the first one is the whole question."""
    text = unicodedata.normalize("NFKC", question)
    quoted = [part for match in _QUOTED.findall(text) for part in match]
    identifiers = [word for word in _WORD.findall(text) if _is_identifier(word.strip(_AROUND))]
    found = (part.strip(_AROUND).casefold() for part in (text, *quoted, *identifiers))
    return list(dict.fromkeys(part for part in found if 1 < len(part) <= _MOST_LETTERS))


def held(wanted: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the quotes that a text contains as whole words."""
    if not wanted:
        return ()
    plain = unicodedata.normalize("NFKC", text).casefold()
    return tuple(quote for quote in wanted if quote in plain and _as_words(quote).search(plain))


def is_spelled(question: str, text: str) -> bool:
    """Return whether a text contains the whole question with the same capitals."""
    return unicodedata.normalize("NFKC", question).strip(_AROUND) in unicodedata.normalize("NFKC", text)


def _is_identifier(word: str) -> bool:
    digits = sum(sign.isdigit() for sign in word)
    letters = any(sign.isalpha() for sign in word)
    return digits >= _LEAST_DIGITS or (digits > 0 and letters and len(word) > 2) or bool(_JOINED.search(word))


def _as_words(quote: str) -> re.Pattern[str]:
    """Return a pattern that finds a quote, but not within a longer word of a script with spaces."""
    before = r"(?<![^\W_])" if _needs_edge(quote[0]) else ""
    after = r"(?![^\W_])" if _needs_edge(quote[-1]) else ""
    return re.compile(before + re.escape(quote) + after)


def _needs_edge(sign: str) -> bool:
    return sign.isalnum() and unicodedata.category(sign) != "Lo"
