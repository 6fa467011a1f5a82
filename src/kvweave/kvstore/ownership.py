"""Which documents own which chunks; a document is an opaque string here.

An entry lives until one of the owned chunks it was made from loses its last owner. Chunks that never had an owner, those of
callers without documents, do not count. Knows nothing about files.
"""

import json
from collections.abc import Iterable

from kvweave.database import Database
from kvweave.kvstore.catalog import Catalog

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS chunk_owners (
        namespace TEXT NOT NULL, chunk TEXT NOT NULL, owner TEXT NOT NULL,
        PRIMARY KEY (namespace, chunk, owner)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS chunk_owners_by_owner ON chunk_owners (namespace, owner)",
)


class Ownership:
    """The table `chunk_owners` of `database`, created if missing; all calls are within one namespace."""

    def __init__(self, database: Database, catalog: Catalog, namespace: str) -> None:
        self._database = database
        self._catalog = catalog
        self._namespace = namespace
        database.script(_SCHEMA)

    def own(self, owner: str, chunks: Iterable[str]) -> None:
        """Record that `owner` has these chunks, in addition to those it has already."""
        self._database.execute(
            """INSERT OR IGNORE INTO chunk_owners (namespace, chunk, owner)
               SELECT ?, value, ? FROM json_each(?)""",
            (self._namespace, owner, json.dumps(list(chunks))),
        )

    def all_owned(self, chunks: Iterable[str]) -> bool:
        """Return whether each of these chunks has an owner; True for no chunks."""
        ownerless = self._database.query(
            """SELECT 1 FROM json_each(?) WHERE NOT EXISTS (
                 SELECT 1 FROM chunk_owners WHERE namespace = ? AND chunk = value) LIMIT 1""",
            (json.dumps(list(chunks)), self._namespace),
        )
        return not ownerless

    def disown(self, owner: str) -> list[str]:
        """Forget an owner and drop every entry made from a chunk that has none left, in one transaction.

        Returns:
            The files of the dropped entries, to be deleted after the commit; none for an unknown owner.
        """
        with self._database.transaction():
            ownerless = self._database.query(
                """SELECT chunk FROM chunk_owners AS mine WHERE namespace = ? AND owner = ? AND NOT EXISTS (
                     SELECT 1 FROM chunk_owners AS other
                     WHERE other.namespace = mine.namespace AND other.chunk = mine.chunk
                       AND other.owner <> mine.owner)""",
                (self._namespace, owner),
            )
            self._database.execute(
                "DELETE FROM chunk_owners WHERE namespace = ? AND owner = ?", (self._namespace, owner)
            )
            return self._catalog.drop_made_from(self._namespace, [chunk for (chunk,) in ownerless])
