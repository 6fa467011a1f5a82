"""The buffer of recent questions, from which the next ones are predicted (PerCache §4.1.2)."""

import time
from typing import Final

from kvweave.store.database import Database

KEPT: Final = 64
"""Questions in the buffer; an earlier one is forgotten."""

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS question_history (
        question TEXT PRIMARY KEY, number INTEGER NOT NULL, asked_at REAL NOT NULL) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS question_history_seen (number INTEGER NOT NULL)",
)


class History:
    """The table `question_history` of `database`, made if it is not there; each question stands in it once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def add(self, question: str) -> None:
        """A user has asked this."""
        with self._database.transaction():
            number = self.last + 1
            self._database.execute(
                """INSERT INTO question_history VALUES (?, ?, ?)
                   ON CONFLICT (question) DO UPDATE SET number = excluded.number, asked_at = excluded.asked_at""",
                (question, number, time.time()),
            )
            self._database.execute("DELETE FROM question_history WHERE number <= ?", (number - KEPT,))

    @property
    def last(self) -> int:
        """The number of the latest question; 0 before the first one."""
        ((number,),) = self._database.query("SELECT coalesce(max(number), 0) FROM question_history")
        return max(int(number), self._seen)

    @property
    def has_news(self) -> bool:
        """Whether somebody has asked something since questions were last predicted from here."""
        return self.last > self._seen

    def recent(self, most: int) -> list[str]:
        """The latest questions, the oldest of them first."""
        rows = self._database.query(
            "SELECT question FROM question_history ORDER BY number DESC LIMIT ?", (most,)
        )
        return [question for (question,) in reversed(rows)]

    def seen(self, number: int) -> None:
        """Questions were predicted from everything up to this number."""
        with self._database.transaction():
            self._database.execute("DELETE FROM question_history_seen")
            self._database.execute("INSERT INTO question_history_seen VALUES (?)", (number,))

    def clear(self) -> None:
        """Forget every question."""
        with self._database.transaction():
            self._database.execute("DELETE FROM question_history")
            self._database.execute("DELETE FROM question_history_seen")

    @property
    def _seen(self) -> int:
        rows = self._database.query("SELECT number FROM question_history_seen")
        return int(rows[0][0]) if rows else 0
