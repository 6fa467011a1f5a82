"""Predicted questions: what each was predicted from, what became of it, and how often it was given to a user.

A predicted question may tell what the documents say, so it goes with any document that it was predicted from, unless a
user has asked the same in these words meanwhile: those are the user's own. Knows nothing about answers.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvweave.store.database import Database

Origin: TypeAlias = Literal["knowledge", "history"]
"""What a question was predicted from: the abstract alone, or earlier questions too."""
Dropped: TypeAlias = Literal["unanswerable"]
"""Why a predicted question is not kept: nothing that was found says anything about it, or the model said so."""

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS predicted_questions (
        question TEXT PRIMARY KEY, origin TEXT NOT NULL, made_at REAL NOT NULL, dropped TEXT,
        given INTEGER NOT NULL DEFAULT 0, asked INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS predicted_from (
        question TEXT NOT NULL REFERENCES predicted_questions (question) ON DELETE CASCADE, version TEXT NOT NULL,
        PRIMARY KEY (version, question)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS predicted_from_by_question ON predicted_from (question)",
)


@dataclass(frozen=True, slots=True)
class PredictionTotals:
    """What prediction has done.

    Attributes:
        predicted: questions that are kept, by what they were predicted from.
        dropped: others that turned out to be unanswerable.
        served: kept ones whose answer a user got at least once.
        given: how often users got such answers.
    """

    predicted: dict[str, int]
    dropped: int
    served: int
    given: int

    @property
    def kept(self) -> int:
        """All that are kept."""
        return sum(self.predicted.values())

    @property
    def given_per_question(self) -> float:
        """Answers given per predicted question; 0 without any."""
        return self.given / self.kept if self.kept else 0.0


class Ledger:
    """The tables `predicted_questions` and `predicted_from` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def put(
        self, question: str, origin: Origin, versions: Iterable[str], dropped: Dropped | None = None
    ) -> None:
        """Write a new prediction down, with the versions of the documents that it was predicted from."""
        with self._database.transaction():
            self._database.execute(
                "INSERT OR IGNORE INTO predicted_questions (question, origin, made_at, dropped) VALUES (?, ?, ?, ?)",
                (question, origin, time.time(), dropped),
            )
            self._database.execute_many(
                "INSERT OR IGNORE INTO predicted_from VALUES (?, ?)",
                [(question, version) for version in set(versions)],
            )

    def knows(self, question: str) -> bool:
        """Whether a question was predicted before, kept or not."""
        return bool(self._database.query("SELECT 1 FROM predicted_questions WHERE question = ?", (question,)))

    def drop(self, question: str, why: Dropped) -> bool:
        """Note that a predicted question is not kept; False, and nothing changes, if a user has asked it meanwhile."""
        changed = self._database.execute(
            "UPDATE predicted_questions SET dropped = ? WHERE question = ? AND NOT asked", (why, question)
        )
        return changed > 0

    def gave(self, question: str) -> None:
        """A user got the answer to a question; it counts if that was predicted and not asked before."""
        self._database.execute(
            "UPDATE predicted_questions SET given = given + 1 WHERE question = ? AND NOT asked", (question,)
        )

    def asked(self, question: str) -> None:
        """A user has asked a question in these words."""
        self._database.execute("UPDATE predicted_questions SET asked = 1 WHERE question = ?", (question,))

    def forget(self, versions: Iterable[str]) -> list[str]:
        """Drop what was predicted from these versions; returns the questions that nobody has asked."""
        values = (json.dumps(list(versions)),)
        condition = "version IN (SELECT value FROM json_each(?))"
        where = f"question IN (SELECT question FROM predicted_from WHERE {condition}) AND NOT asked"
        with self._database.transaction():
            rows = self._database.query(f"SELECT question FROM predicted_questions WHERE {where}", values)
            self._database.execute(f"DELETE FROM predicted_questions WHERE {where}", values)
            self._database.execute(f"DELETE FROM predicted_from WHERE {condition}", values)
        return [question for (question,) in rows]

    def totals(self) -> PredictionTotals:
        """Numbers for people."""
        rows = self._database.query(
            """SELECT origin, sum(dropped IS NULL), sum(dropped IS NOT NULL), sum(given > 0), sum(given)
               FROM predicted_questions GROUP BY origin ORDER BY origin"""
        )
        return PredictionTotals(
            predicted={origin: int(kept) for origin, kept, *_ in rows},
            dropped=sum(int(dropped) for _, _, dropped, _, _ in rows),
            served=sum(int(served) for *_, served, _ in rows),
            given=sum(int(given) for *_, given in rows),
        )

    def clear(self) -> None:
        """Forget every prediction."""
        self._database.execute("DELETE FROM predicted_questions")
