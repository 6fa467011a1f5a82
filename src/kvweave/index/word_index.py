"""The word index of the table of chunks: a column with the words of each text, and an index over that column.

The column's name holds the version of what the words are. A table of another version gets a new column, which is filled and indexed
before the old one goes: a search always has one that is whole. Each step is one commit of LanceDB, and the
next process continues after a crash between two of them.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pyarrow as pa

from kvweave.index.lance import FTS
from kvweave.index.search import has_word_index
from kvweave.index.words import COLUMN, index_words

FIELD: Final = pa.field(COLUMN, pa.string())
"""Null in rows that a process of another version has written, until `fill`."""

_TEXT: Final = "text"
_PREFIX: Final = "words_"
_BATCH_ROWS: Final = 2000
_LOG = logging.getLogger(__name__)

Commit = Callable[[Callable[[], Any]], Any]
"""Runs an action that commits, again after a conflict with another process."""


def prepare(table: Any, commit: Commit) -> None:
    """Create the column and its index where they are missing, then drop what other versions had."""
    if not has_word_index(table):
        rows = table.count_rows()
        if rows:
            _LOG.warning("indexing the words of %d chunks; this is done once", rows)
        commit(lambda: _add_column(table))
        fill(table, commit)
        commit(lambda: _create_index(table))
    if _other_indexes(table):
        commit(lambda: _drop_others(table))


def fill(table: Any, commit: Commit) -> None:
    """Write the words of rows that have none."""
    while True:
        missing = table.search().where(f"{COLUMN} IS NULL").select(["row_id", _TEXT]).limit(_BATCH_ROWS)
        texts = {row["row_id"]: row[_TEXT] for row in missing.to_list()}
        if not texts:
            return
        words = pa.table({"row_id": list(texts), COLUMN: [index_words(text) for text in texts.values()]})
        if not commit(partial(_merge, table, words)).num_updated_rows:
            return  # another process has deleted these rows; later ones wait for the next call


def _other_indexes(table: Any) -> list[str]:
    return [index.name for index in table.list_indices() if index.columns != [COLUMN]]


def _add_column(table: Any) -> None:
    if COLUMN not in table.schema.names:
        table.add_columns(FIELD)


def _merge(table: Any, words: pa.Table) -> Any:
    return table.merge_insert("row_id").when_matched_update_all().execute(words)


def _create_index(table: Any) -> None:
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
            if name in _other_indexes(table):  # else another process was quicker
                raise
    others = [name for name in table.schema.names if name.startswith(_PREFIX) and name != COLUMN]
    if others:
        table.drop_columns(others)
