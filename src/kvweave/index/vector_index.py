"""Chunk texts and their vectors in a LanceDB table that several processes may read and write at once.

A row is only a copy: whether it counts is for the caller's `visible` to say, whose truth is the shelf. Knows
nothing about KV.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lancedb
import numpy as np
import numpy.typing as npt
from lancedb.index import FTS

from kvweave.errors import KnowledgeBaseMismatch, StoreError
from kvweave.index.search import FoundChunk, arrow_table, hybrid_search, in_list, nearest_texts, table_schema
from kvweave.types import Chunk


@contextmanager
def told_as_store_errors() -> Iterator[None]:
    """Turn what LanceDB raises into a StoreError that says what to do."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(
            f"the index of chunks cannot be used: {why[:200]}. Another process may have emptied it just now: try again; "
            "else delete the folder `vectors` of this knowledge base and add the documents again"
        ) from error


__all__ = ["GRACE_S", "FoundChunk", "VectorIndex"]

TABLE = "chunks"
GRACE_S = 3600.0
"""Younger invisible rows are left alone by a sweep: another process may be about to list them."""

T = TypeVar("T")

_ATTEMPTS = 8
_FIRST_WAIT_S = 0.05
_LISTED_AT_ONCE = 1000
_log = logging.getLogger(__name__)


class VectorIndex:
    """The table of one knowledge base under `folder`, made if it is not there.

    Rows are found by both halves of a search as soon as `add` returns: what the word index does not hold yet,
    LanceDB searches directly, which `sweep` keeps short. Vectors are compared one by one, exactly.

    Args:
        folder: where LanceDB keeps its files.
        dimensions: length of the vectors.

    Raises:
        KnowledgeBaseMismatch: the table was made for vectors of another length.
        StoreError: the folder holds something that LanceDB cannot open.
    """

    def __init__(self, folder: Path, dimensions: int) -> None:
        self._schema = table_schema(dimensions)
        self._dimensions = dimensions
        try:
            self._table = self._opened(folder)
        except (RuntimeError, ValueError, OSError) as error:
            raise StoreError(
                f"the index in {folder} cannot be opened ({_first_line(error)}); move it away"
            ) from error
        made_for = self._table.schema.field("vector").type.list_size
        if made_for != dimensions:
            raise KnowledgeBaseMismatch(
                f"the index in {folder} holds vectors of length {made_for}, this embedding model makes {dimensions}; "
                "use the model it was made with, or another knowledge base"
            )
        self._make_word_index()

    @told_as_store_errors()
    def add(self, chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32]) -> None:
        """Write chunks of whole documents; rows of the same document versions are replaced.

        One call for many documents is much faster than one for each. Safe beside other processes' calls, even
        for the same documents: a version's rows are never missing in between.

        Args:
            chunks: all chunks of each document in question, each document's in reading order.
            vectors: (chunks, dimensions), rows of length 1.
        """
        assert vectors.shape == (len(chunks), self._dimensions), vectors.shape
        if not chunks:
            return
        now = time.time()
        rows = arrow_table(chunks, vectors, now, self._schema)
        _retried(partial(self._table.add, rows))
        # What an interrupted add left, or a knowledge base that was emptied and filled anew with other lengths.
        # Only *older* rows: two processes adding one document must not delete each other's.
        for some in _portions(sorted(set(rows["version"].to_pylist()))):
            _retried(partial(self._table.delete, f"written_s < {now!r} AND {in_list('version', some)}"))

    @told_as_store_errors()
    def search(
        self, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
    ) -> list[FoundChunk]:
        """The k chunks that fit a question best, by words (BM25) and by meaning, best first.

        Args:
            question: any text, also empty; quotes and operators in it mean nothing.
            vector: its vector, (dimensions,), of length 1.
            k: how many at most; fewer come back only where fewer are visible or related.
            visible: the versions whose rows count (`DocumentTable.visible`).
        """
        return hybrid_search(self._table, question, vector, k, visible)

    @told_as_store_errors()
    def nearest(self, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]) -> list[str]:
        """The texts of the k chunks nearest in meaning to a vector (dimensions,), nearest first, each text once."""
        return nearest_texts(self._table, vector, k, visible)

    @told_as_store_errors()
    def texts(self, row_ids: Sequence[str]) -> dict[str, str]:
        """The texts of rows by id; ids that the table does not hold are left out."""
        texts: dict[str, str] = {}
        for some in _portions(row_ids):
            rows = self._table.search().where(in_list("row_id", some)).select(["row_id", "text"])
            texts.update((row["row_id"], row["text"]) for row in rows.to_list())
        return texts

    @told_as_store_errors()
    def rows_by_version(self) -> dict[str, int]:
        """How many different rows each version has here; reads two columns. Fewer than listed: some are lost."""
        return _counted(self._table.search())

    @told_as_store_errors()
    def rows_of(self, versions: Collection[str]) -> dict[str, int]:
        """The same of these versions alone."""
        counts: dict[str, int] = {}
        for some in _portions(sorted(versions)):
            counts.update(_counted(self._table.search().where(in_list("version", some))))
        return counts

    @told_as_store_errors()
    def delete(self, versions: Collection[str], before_s: float) -> None:
        """Delete the rows of some versions that were written before a time, in seconds since the epoch.

        Take the time before finding out that nobody lists them: what is added again since then stays.
        """
        for some in _portions(sorted(versions)):
            condition = f"written_s < {before_s!r} AND {in_list('version', some)}"
            _retried(partial(self._table.delete, condition))

    @told_as_store_errors()
    def sweep(self, visible: Collection[str], grace_s: float = GRACE_S) -> int:
        """Delete rows that no visible version owns, and the files of deleted rows; worth doing after an `add`.

        Also brings new rows into the word index and joins small files, which changes no result; when other
        writers keep getting in between, that is left undone.

        Args:
            visible: the versions to keep.
            grace_s: rows and files younger than this, in seconds, are kept: other processes may need them.

        Returns:
            How many rows were deleted.
        """
        before = time.time() - grace_s
        old = self._table.search().where(f"written_s <= {before!r}").select(["version"])
        versions = set(old.to_arrow()["version"].to_pylist())
        deleted = 0
        for some in _portions(sorted(versions.difference(visible))):
            condition = f"written_s <= {before!r} AND {in_list('version', some)}"
            deleted += int(_retried(partial(self._table.delete, condition)).num_deleted_rows)
        self._compact(max(grace_s, 0.001))
        return deleted

    def _opened(self, folder: Path) -> Any:
        # Interval zero: each call sees what other processes have committed.
        connection = lancedb.connect(folder, read_consistency_interval=timedelta(0))

        def table() -> Any:
            if TABLE in connection.list_tables().tables:
                return connection.open_table(TABLE)
            return connection.create_table(TABLE, schema=self._schema, exist_ok=True)

        return _retried(table)

    def _make_word_index(self) -> None:
        def make() -> None:
            if not self._table.list_indices():
                self._table.create_index("text", config=FTS(), replace=False)

        _retried(make)

    def _compact(self, keep_s: float) -> None:
        try:
            _retried(lambda: self._table.optimize(cleanup_older_than=timedelta(seconds=keep_s)))
        except RuntimeError as error:
            _log.info("index not compacted this time: %s", _first_line(error))


def _retried(action: Callable[[], T]) -> T:
    """Run an action again when another process' commit got in between. LanceDB itself retries appends only."""
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            if attempt == _ATTEMPTS - 1 or not _is_conflict(error):
                raise
            time.sleep(_FIRST_WAIT_S * 2**attempt)
    raise AssertionError("the loop returns or raises")


def _is_conflict(error: Exception) -> bool:
    # A table that another process is just making is listed before it can be opened.
    text = str(error).lower()
    return "conflict" in text or "already exists" in text or f"table '{TABLE}' was not found" in text


def _counted(rows: Any) -> dict[str, int]:
    found = rows.select(["version", "row_id"]).to_arrow()
    counts = found.group_by("version").aggregate([("row_id", "count_distinct")])
    return dict(zip(counts["version"].to_pylist(), counts["row_id_count_distinct"].to_pylist(), strict=True))


def _portions(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + _LISTED_AT_ONCE] for start in range(0, len(names), _LISTED_AT_ONCE))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
