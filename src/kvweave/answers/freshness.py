"""When an answer stops counting: at once with any document it rests on, and as soon as better chunks are there.

The epoch counts the changes of the document list. An answer whose epoch is the present one rests on the best chunks
there are; of any other that has to be seen first, by searching again for its question. So nothing has to be found
out while documents come in, and nothing is given in between that newer documents would have changed.
"""

import json
from collections.abc import Iterable
from typing import Final

from kvweave.answers.entries import Entries
from kvweave.store.database import Database

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS answer_versions (
        version TEXT NOT NULL, question INTEGER NOT NULL REFERENCES banked_questions (id) ON DELETE CASCADE,
        PRIMARY KEY (version, question)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS answer_versions_by_question ON answer_versions (question)",
)
_EPOCH: Final = "epoch"


class Freshness:
    """The table `answer_versions` of `database`: which documents' versions each answer rests on."""

    def __init__(self, database: Database, entries: Entries) -> None:
        self._database = database
        self._entries = entries
        database.script(_SCHEMA)

    @property
    def epoch(self) -> int:
        """How often the list of documents has changed."""
        return int(self._entries.fact(_EPOCH))

    def rests_on(self, question: int, versions: Iterable[str]) -> None:
        """Write down what a question's answer rests on, in place of what its earlier answer did."""
        with self._database.transaction():
            self._database.execute("DELETE FROM answer_versions WHERE question = ?", (question,))
            self._database.execute_many(
                "INSERT INTO answer_versions VALUES (?, ?)",
                [(version, question) for version in set(versions)],
            )

    def documents_changed(self, gone: Iterable[str] = ()) -> int:
        """The list of documents changes in this transaction: answers that rest on versions that go are dropped.

        Returns how many answers were.
        """
        told = json.dumps(list(gone))
        with self._database.transaction():
            self._entries.raise_fact(_EPOCH)
            rows = self._database.query(
                "SELECT DISTINCT question FROM answer_versions WHERE version IN (SELECT value FROM json_each(?))",
                (told,),
            )
            dropped = self._entries.drop_answers([id_ for (id_,) in rows], "changed")
            self._database.execute(
                "DELETE FROM answer_versions WHERE version IN (SELECT value FROM json_each(?))", (told,)
            )
        return dropped
