"""Texts and vectors of chunks in a LanceDB table, which several processes may read and write at once.

Only rows of visible versions count: the list of documents knows these, and callers pass them as `visible`. A search finds a row
without a vector by its words alone.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import lancedb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from lancedb.index import FTS
from lancedb.query import MatchQuery

from kvweave.errors import KnowledgeBaseMismatch, StoreError
from kvweave.files import age_s, hold_lock, make_folder, try_lock
from kvweave.index.documents import document_version, row_id
from kvweave.index.durable import Durability
from kvweave.index.search import (
    FoundChunk,
    Rerank,
    has_word_index,
    hybrid_search,
    in_list,
    nearest_texts,
    reranked,
)
from kvweave.index.words import COLUMN, index_words
from kvweave.types import Chunk

TABLE: Final = "chunks"
GRACE_S: Final = 3600.0
"""A sweep keeps younger rows even if they are not visible: another process may be about to list them."""

RERANKED: Final = 20
"""The least number of chunks that a reranking model gets."""
_MOST_UNCOUNTED: Final = 1000
"""A search for more chunks than this counts the rows first, since LanceDB reserves memory for all results it is asked for."""

_WORDS_FIELD: Final = pa.field(COLUMN, pa.string())
"""Null in rows that another version of kvweave has written, until `_fill_words`."""

_COLUMN_PREFIX: Final = "words_"
_FILLED_ROWS: Final = 2000

_WRITERS: Final = "writers.lock"
"""Whoever writes holds a shared lock on it. Nobody does when files are deleted that no version names."""
_TEMPORARY: Final = ".tmp"
"""In the names of files that are being written, by LanceDB too."""
_NEVER: Final = timedelta(days=36_500)
_AHEAD_S: Final = 60.0
"""A time further in the future was written by a clock that was ahead: nothing is kept because it seems young."""
_MOST_SWEEPS: Final = 4
_ATTEMPTS: Final = 8
_FIRST_WAIT_S: Final = 0.05
_NAMES_PER_QUERY: Final = 1000
CACHE_BYTES: Final = {"index_cache_size_bytes": 256 * 2**20, "metadata_cache_size_bytes": 16 * 2**20}
"""Limits for all tables of the process. Each change of a document makes a new version of the table, and without limits LanceDB keeps
what it has read of every version, up to 7 GB for each knowledge base."""
_log = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def _as_store_errors() -> Iterator[None]:
    """Turn errors of LanceDB into a StoreError that says what to do."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        raise StoreError(
            f"the index of chunks cannot be used: {_first_line(error)[:200]}. Another process may have emptied it just now: "
            "try again; else delete the folder `vectors` of this knowledge base and add the documents again"
        ) from error


class VectorIndex:
    """The table of one knowledge base under `folder`; it is created if it does not exist.

    Searches find rows as soon as `add` returns. LanceDB scans rows that the word index does not contain yet; `sweep`
    adds them to the index. Every vector is compared, without an approximate index.

    Args:
        folder: for LanceDB's files.
        dimensions: length of the vectors.
        rerank: scores the best chunks of a search again, which orders them.

    Raises:
        KnowledgeBaseMismatch: the table was created for vectors of another length.
        StoreError: the folder holds something that LanceDB cannot open.
    """

    def __init__(self, folder: Path, dimensions: int, rerank: Rerank | None = None) -> None:
        self._rerank = rerank
        self.schema = table_schema(dimensions)
        self._dimensions = dimensions
        self._rewrite = False  # whether files hold rows that this object has deleted
        self._folder = folder
        self._durability = Durability(folder, folder / f"{TABLE}.lance" / "_versions", self._is_readable)
        try:
            self.table = self._opened(folder)
            stored = self.table.schema.field("vector").type.list_size
        except (RuntimeError, ValueError, OSError) as error:
            raise StoreError(
                f"the index in {folder} cannot be opened ({_first_line(error)}); move it away"
            ) from error
        if stored != dimensions:
            raise KnowledgeBaseMismatch(
                f"the index in {folder} holds vectors of length {stored}, this embedding model makes {dimensions}; "
                "use the model it was made with, or another knowledge base"
            )
        try:
            lost = not self._durability.has_begun and not self._is_readable()
            if lost or not has_word_index(self.table) or _other_indexes(self.table):
                with self._writing():
                    if lost:  # a power cut before anything was synced has taken files of the word index
                        _drop_word_index(self.table)
                    _prepare_words(self.table)
            self._durability.begin(self.table.version)
        except (RuntimeError, ValueError, OSError) as error:
            # The folder may be read-only. Searches then use the index that is there.
            _log.warning("the words of the chunks could not be indexed: %s", _first_line(error))

    @_as_store_errors()
    def add(self, chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32] | None) -> None:
        """Write the chunks of whole documents, in place of earlier rows of the same document versions.

        One call for many documents is much faster than one for each. Other processes may add the same documents at the
        same time; at no moment are the rows of a version missing.

        Args:
            chunks: all chunks of each document, each document's in reading order.
            vectors: (chunks, dimensions), rows of length 1; None if `write_vectors` follows.
        """
        assert vectors is None or vectors.shape == (len(chunks), self._dimensions), vectors.shape
        if not chunks:
            return
        with self._writing():
            if vectors is None:
                _retried(self._allow_rows_without_vector)
            now = time.time()
            rows = arrow_table(chunks, vectors, now, self.schema)
            _retried(partial(self.table.add, rows))
            # Rows of an interrupted add, or from before the knowledge base was emptied and filled with other chunk lengths.
            # Only *older* rows: two processes that add one document must not delete each other's.
            self._delete_rows(set(rows["version"].to_pylist()), f"written_s < {now!r}")
            self._sync()

    @_as_store_errors()
    def without_vector(self, row_ids: Sequence[str]) -> dict[tuple[str, str], str]:
        """Return the texts of those of the rows that have no vector, by row id and digest."""
        rows = self._rows(row_ids, " AND vector IS NULL")
        return {(row["row_id"], row["digest"]): row["text"] for row in rows}

    @_as_store_errors()
    def write_vectors(self, rows: Sequence[tuple[str, str]], vectors: npt.NDArray[np.float32]) -> None:
        """Write vectors (rows, dimensions) for the rows with these ids and digests; skip rows that no longer exist."""
        columns = {
            "row_id": [row for row, _ in rows],
            "digest": [digest for _, digest in rows],
            "vector": _vector_column(vectors),
        }
        table = pa.table(columns, schema=pa.schema([self.schema.field(name) for name in columns]))
        merge = self.table.merge_insert(["row_id", "digest"]).when_matched_update_all()
        with self._writing():
            _retried(partial(merge.execute, table))
            self._sync()

    @_as_store_errors()
    def search(
        self, question: str, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]
    ) -> list[FoundChunk]:
        """Return the k chunks that match a question best, best first; see `hybrid_search`, and `Rerank`.

        Args:
            question: any text; it may be empty.
            vector: the question's vector, (dimensions,), of length 1.
            k: most results; there are fewer only if fewer chunks are visible.
            visible: the versions whose rows count (`DocumentTable.visible_versions`).
        """
        if k > _MOST_UNCOUNTED:
            k = min(k, self.table.count_rows())
        if self._rerank is None:
            return hybrid_search(self.table, question, vector, k, visible)
        found = hybrid_search(self.table, question, vector, max(RERANKED, 2 * k), visible)
        return reranked(found, question, self._rerank)[:k]

    @_as_store_errors()
    def nearest(self, vector: npt.NDArray[np.float32], k: int, visible: Collection[str]) -> list[str]:
        """Return the texts of the k chunks nearest to a vector (dimensions,), nearest first, each text once."""
        return nearest_texts(self.table, vector, k, visible)

    @_as_store_errors()
    def texts(self, row_ids: Sequence[str]) -> dict[str, str]:
        """Return the texts of rows by row id; leave out ids that the table does not contain."""
        return {row["row_id"]: row["text"] for row in self._rows(row_ids)}

    @_as_store_errors()
    def passages(self, version: str) -> list[tuple[int, str]]:
        """Return offset and text, without a repeated head, of each chunk of a document version, in reading order."""
        found = self.table.search().where(in_list("version", [version])).select(["start", "end", "text"])
        rows = {(row["start"], row["end"], row["text"]) for row in found.to_list()}
        return [(start, text[len(text) - (end - start) :]) for start, end, text in sorted(rows)]

    @_as_store_errors()
    def rows_by_version(self, versions: Collection[str] | None = None) -> dict[str, int]:
        """Return the number of different row ids of these versions, or of all. If it is less than the list says, rows were lost."""
        if versions is None:
            searches = [self.table.search()]
        else:
            parts = (in_list("version", names) for names in _batches(sorted(versions)))
            searches = [self.table.search().where(part) for part in parts]
        counts: dict[str, int] = {}
        for rows in searches:
            found = rows.select(["version", "row_id"]).to_arrow().group_by("version")
            for counted in found.aggregate([("row_id", "count_distinct")]).to_pylist():
                counts[counted["version"]] = counted["row_id_count_distinct"]
        return counts

    @_as_store_errors()
    def delete(self, versions: Collection[str], before_s: float) -> None:
        """Delete the rows of some versions that were written before a time, in seconds since 1970.

        Take the time before you check that the versions are not listed: then rows that are added after the check stay.
        """
        with self._writing():
            self._delete_rows(versions, _written_before(before_s))

    @_as_store_errors()
    def sweep(self, visible: Collection[str], grace_s: float = GRACE_S) -> int:
        """Delete the rows of versions that are not visible, and files that are no longer used; return the number of rows.

        Also adds new rows to the word index, joins small files, which makes searches faster, and writes files with deleted rows
        again. This part is skipped if other processes write too often. Call it after an `add`.

        Args:
            visible: the versions to keep.
            grace_s: rows and files younger than this, in seconds, are kept: other processes may need them.
        """
        before = time.time() - grace_s
        with self._writing():
            old = _written_before(before)
            versions = set(
                self.table.search().where(old).select(["version"]).to_arrow()["version"].to_pylist()
            )
            deleted = self._delete_rows(versions.difference(visible), old)
            _fill_words(self.table)
        try:
            self._compact()
            self._delete_unused(timedelta(seconds=max(grace_s, 0.001)))
        except RuntimeError as error:
            _log.info("index not compacted this time: %s", _first_line(error))
        return deleted

    @property
    @_as_store_errors()
    def has_old_files(self) -> bool:
        """Whether a `sweep` may delete files with deleted rows: those of earlier versions of the table, or of killed writers."""
        return len(self.table.list_versions()) > 1 or self._swept() != self._file_names()

    def _rows(self, row_ids: Sequence[str], condition: str = "") -> Iterator[dict[str, str]]:
        """Yield row id, digest and text of the rows with these ids that meet a condition."""
        for names in _batches(row_ids):
            rows = self.table.search().where(in_list("row_id", names) + condition)
            yield from rows.select(["row_id", "digest", "text"]).to_list()

    def _compact(self) -> None:
        """Join small files, and write those with deleted rows again."""
        with self._writing():
            if self._rewrite or _has_deleted_rows(self.table):
                _retried(partial(_split, self.table))
                _retried(
                    lambda: self.table.optimize(cleanup_older_than=_NEVER)
                )  # indexes the row, else files are not joined
            _retried(lambda: self.table.optimize(cleanup_older_than=_NEVER))
            self._sync()  # before the files go that it replaces
            self._rewrite = False

    def _delete_unused(self, older_than: timedelta) -> None:
        """Delete the files of earlier versions and, while nobody writes, those of killed writers.

        LanceDB keeps files that no version names for a week, since somebody may be writing them, and temporary files for ever.
        """
        with try_lock(self._folder / _WRITERS) as alone:
            if alone:
                self._forget_versions_from_the_future()
                names = self._file_names()
                for _ in range(_MOST_SWEEPS):  # LanceDB does not report a file that it could not delete
                    _retried(
                        lambda: self.table.optimize(cleanup_older_than=older_than, delete_unverified=True)
                    )
                    before, names = names, self._file_names()
                    if names == before:
                        break
                (self._folder / _WRITERS).write_text(names)
        if not alone:
            with self._writing():
                _retried(lambda: self.table.optimize(cleanup_older_than=older_than))
        for path in _files_in(self._folder):
            if _TEMPORARY in path.name and age_s(path) > GRACE_S:
                path.unlink(missing_ok=True)

    def _forget_versions_from_the_future(self) -> None:
        """Forget versions that were written while the clock was ahead: LanceDB keeps them until it gets there."""
        ahead, newest = time.time() + _AHEAD_S, self.table.version
        written = {each["version"]: each["timestamp"].timestamp() for each in self.table.list_versions()}
        self._durability.forget([one for one, at in written.items() if at > ahead and one != newest])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep others from deleting the files that are being written, which no version names yet.

        After an error, a version that LanceDB has written in part, so that it cannot be read, is dropped, unless others write.
        """
        try:
            with hold_lock(self._folder / _WRITERS, shared=True):
                yield
        except (RuntimeError, ValueError, OSError):
            with suppress(RuntimeError, ValueError, OSError), try_lock(self._folder / _WRITERS) as alone:
                if alone and not self._is_readable():
                    self._durability.go_back()
                    lance_session.cache_clear()  # it may know versions that were dropped
                    self.table = self._opened(self._folder)
            raise

    def _is_readable(self) -> bool:
        """Return whether the newest version of the table can be read, rows and words; nothing that was read before counts."""
        try:
            found = lancedb.connect(self._folder, session=new_session()).open_table(TABLE)
            found.search().select(["row_id"]).to_arrow()
            if has_word_index(found):
                found.search(MatchQuery("a", COLUMN), query_type="fts").limit(1).to_list()
        except (RuntimeError, ValueError, OSError):
            return False
        return True

    def _file_names(self) -> str:
        """Return a digest of the names of all files of the table."""
        names = sorted(map(str, _files_in(self._folder / f"{TABLE}.lance")))
        return xxhash.xxh3_64_hexdigest("\n".join(names).encode())

    def _swept(self) -> str:
        """Return what `_file_names` was after a sweep that left no file of a killed writer."""
        with suppress(OSError):
            return (self._folder / _WRITERS).read_text()
        return ""

    def _sync(self) -> None:
        """Write to the disk what LanceDB has written: a commit of the catalogue that needs it may follow, and LanceDB does not."""
        self._durability.sync(self.table.version)

    def _delete_rows(self, versions: Collection[str], condition: str) -> int:
        """Delete the rows of some versions that meet a condition; return their number."""
        deleted = 0
        for names in _batches(sorted(versions)):
            delete = partial(self.table.delete, f"{condition} AND {in_list('version', names)}")
            deleted += int(_retried(delete).num_deleted_rows)
        self._rewrite = self._rewrite or deleted > 0
        return deleted

    def _opened(self, folder: Path) -> Any:
        self._durability.restore()
        # Interval zero: each call sees what other processes have committed.
        connection = lancedb.connect(folder, read_consistency_interval=timedelta(0), session=lance_session())

        def table() -> Any:
            if TABLE in connection.list_tables().tables:
                return connection.open_table(TABLE)
            make_folder(folder)
            with hold_lock(folder / _WRITERS, shared=True):
                return connection.create_table(TABLE, schema=self.schema, exist_ok=True)

        return _retried(table)

    def _allow_rows_without_vector(self) -> None:
        """Make the column nullable in a table that an earlier version of kvweave has created."""
        if not self.table.schema.field("vector").nullable:
            self.table.alter_columns({"path": "vector", "nullable": True})


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and those below it; LanceDB may be deleting some meanwhile."""
    return (Path(place, name) for place, _, names in os.walk(folder) for name in names)


@cache
def lance_session() -> Any:
    """Return the session of the process; all tables share its caches."""
    return new_session()


def new_session() -> Any:
    """Return a session that knows nothing yet."""
    return lancedb.Session(**CACHE_BYTES)


def _retried(action: Callable[[], T]) -> T:
    """Run an action; run it again if the commit of another process conflicts with it. LanceDB only retries appends."""
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            if attempt == _ATTEMPTS - 1 or not _is_conflict(error):
                raise
            time.sleep(_FIRST_WAIT_S * 2**attempt)
    raise AssertionError("the loop returns or raises")


def _is_conflict(error: Exception) -> bool:
    # While another process creates the table, it is listed but cannot be opened yet.
    text = str(error).lower()
    return "conflict" in text or "already exist" in text or f"table '{TABLE}' was not found" in text


def _has_deleted_rows(table: Any) -> bool:
    """Whether the one file of the table holds deleted rows. If there are several, LanceDB joins them sooner or later."""
    stats = table.stats()
    files = stats["fragment_stats"]
    return bool(files["num_fragments"] == 1 and files["lengths"]["max"] > stats["num_rows"])


def _split(table: Any) -> None:
    """Write a row to a file of its own. LanceDB then joins all files (of up to a million rows), without deleted rows.

    By itself it writes a file again once a tenth of its rows are deleted. Until then it keeps the text of the deleted ones.
    """
    for row in table.search().select(["row_id"]).limit(1).to_list():
        table.update(where=in_list("row_id", [row["row_id"]]), values_sql={"position": "position"})


def _written_before(time_s: float) -> str:
    """Return the condition of rows written up to a time in the past; all that seem to be written in the future are."""
    return f"(written_s < {time_s!r} OR written_s > {time.time() + _AHEAD_S!r})"


def _batches(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[start : start + _NAMES_PER_QUERY] for start in range(0, len(names), _NAMES_PER_QUERY))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def table_schema(dimensions: int) -> pa.Schema:
    """Return the columns of the table of chunks."""
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
            _WORDS_FIELD,
            pa.field("written_s", pa.float64(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions)),  # null until it is written
        ]
    )


def arrow_table(
    chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32] | None, written_s: float, schema: pa.Schema
) -> pa.Table:
    """Return the rows of these chunks; without `vectors`, their vectors are null."""
    versions = [document_version(chunk.document, chunk.document_digest) for chunk in chunks]
    counters = defaultdict[str, Iterator[int]](count)
    positions = [next(counters[version]) for version in versions]
    columns = {
        "row_id": list(map(row_id, versions, positions)),
        "version": versions,
        "source": [chunk.document for chunk in chunks],
        "position": positions,
        "start": [chunk.start for chunk in chunks],
        "end": [chunk.end for chunk in chunks],
        "digest": [chunk.digest for chunk in chunks],
        "text": [chunk.text for chunk in chunks],
        COLUMN: [index_words(chunk.text) for chunk in chunks],
        "written_s": [written_s] * len(chunks),
        "vector": [None] * len(chunks) if vectors is None else _vector_column(vectors),
    }
    return pa.table(columns, schema=schema)


def _vector_column(vectors: npt.NDArray[np.float32]) -> pa.FixedSizeListArray:
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())  # (chunks · dimensions,)
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


# The column with the words of each text, and its index
#
# The column's name contains the version of the words. A table of another version gets a new column, which is filled and indexed
# before the old one is dropped, so that a search always has a complete one. Each step is one commit of LanceDB. After a crash between
# two steps, the next process continues.


def _prepare_words(table: Any) -> None:
    """Create the column and its index if they are missing, then drop those of other versions."""
    if not has_word_index(table):
        rows = table.count_rows()
        if rows:
            _log.warning("indexing the words of %d chunks; this is done once", rows)
        _retried(partial(add_word_column, table))
        _fill_words(table)
        _retried(partial(_create_word_index, table))
    if _other_indexes(table):
        _retried(partial(_drop_others, table))


def _fill_words(table: Any) -> None:
    """Write the words of rows that have none."""
    while True:
        missing = table.search().where(f"{COLUMN} IS NULL").select(["row_id", "text"]).limit(_FILLED_ROWS)
        texts = {row["row_id"]: row["text"] for row in missing.to_list()}
        if not texts:
            return
        words = pa.table({"row_id": list(texts), COLUMN: [index_words(text) for text in texts.values()]})
        merge = table.merge_insert("row_id").when_matched_update_all()
        if not _retried(partial(merge.execute, words)).num_updated_rows:
            return  # another process has deleted these rows; the next call fills the others


def _drop_word_index(table: Any) -> None:
    for name in [index.name for index in table.list_indices() if COLUMN in index.columns]:
        _retried(partial(table.drop_index, name))


def _other_indexes(table: Any) -> list[str]:
    return [index.name for index in table.list_indices() if index.columns != [COLUMN]]


def add_word_column(table: Any) -> None:
    """Add the column of words to a table of an earlier version."""
    if COLUMN not in table.schema.names:
        table.add_columns(_WORDS_FIELD)


def _create_word_index(table: Any) -> None:
    if not has_word_index(table):
        words_alone = FTS(
            base_tokenizer="whitespace",
            max_token_length=None,
            lower_case=False,
            stem=False,
            remove_stop_words=False,
            ascii_folding=False,
        )
        table.create_index(COLUMN, config=words_alone, replace=False)


def _drop_others(table: Any) -> None:
    for name in _other_indexes(table):
        try:
            table.drop_index(name)
        except RuntimeError:
            if name in _other_indexes(table):  # otherwise another process has dropped it
                raise
    others = [name for name in table.schema.names if name.startswith(_COLUMN_PREFIX) and name != COLUMN]
    if others:
        table.drop_columns(others)
