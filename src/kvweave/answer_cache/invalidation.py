"""Which stored answers a change of the documents makes invalid."""

import json
from collections.abc import Iterable
from typing import Final

from kvweave.answer_cache.entries import Entries
from kvweave.database import Database

_EPOCH: Final = "epoch"
"""The number in `bank_facts`."""


class Invalidation:
    """The table `answer_versions` of `database`: the document versions that each answer was made from."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS answer_versions (
            version TEXT NOT NULL, question INTEGER NOT NULL REFERENCES banked_questions (id) ON DELETE CASCADE,
            PRIMARY KEY (version, question)) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS answer_versions_by_question ON answer_versions (question)",
    )

    def __init__(self, database: Database, entries: Entries) -> None:
        self._database = database
        self._entries = entries
        database.script(self._SCHEMA)

    @property
    def epoch(self) -> int:
        """Number of changes to the document list."""
        return int(self._entries.counter(_EPOCH))

    def set_versions(self, question: int, versions: Iterable[str]) -> None:
        """Store what a question's answer was made from, in place of what was stored for its earlier answer."""
        with self._database.transaction():
            self._database.execute("DELETE FROM answer_versions WHERE question = ?", (question,))
            self._database.execute_many(
                "INSERT INTO answer_versions VALUES (?, ?)",
                [(version, question) for version in set(versions)],
            )

    def documents_changed(self, gone: Iterable[str]) -> int:
        """Start the next epoch and drop the answers made from versions that are gone; return how many."""
        versions = json.dumps(list(gone))
        with self._database.transaction():
            self._entries.increase(_EPOCH)
            rows = self._database.query(
                "SELECT DISTINCT question FROM answer_versions WHERE version IN (SELECT value FROM json_each(?))",
                (versions,),
            )
            dropped = self._entries.drop_answers([id_ for (id_,) in rows], "changed")
            self._database.execute(
                "DELETE FROM answer_versions WHERE version IN (SELECT value FROM json_each(?))", (versions,)
            )
        return dropped
