"""What question prediction stores: a summary of the documents, the questions asked, and the questions predicted.

It is part of the knowledge base's own database, so the commit that removes a document also deletes what came from it.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvweave.database import Database

HISTORY_LIMIT: Final = 64
"""The most questions in the history; earlier ones are deleted."""

PredictionOrigin: TypeAlias = Literal["knowledge", "history"]
"""What a question was predicted from: the summary alone, or earlier questions too."""
DropReason: TypeAlias = Literal["unanswerable"]
"""Why a predicted question was dropped: no retrieved chunk is about it, or the model had no answer."""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A listed chunk: its name in the index, the version of its document, its length."""

    name: str
    version: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SummaryPart:
    """Key content of some chunks, the versions of their documents, and the rounds of predictions made from it."""

    id: int
    text: str
    versions: frozenset[str]
    rounds: int


@dataclass(frozen=True, slots=True)
class PredictionTotals:
    """What prediction has done.

    Attributes:
        predicted: number of questions kept, by origin.
        dropped: number of questions found unanswerable.
        served: number of kept questions whose answer a user got at least once.
        given: how often users got such answers.
    """

    predicted: dict[str, int]
    dropped: int
    served: int
    given: int

    @property
    def kept(self) -> int:
        """Number of questions kept."""
        return sum(self.predicted.values())

    @property
    def given_per_question(self) -> float:
        """Answers given per predicted question; 0 without any."""
        return self.given / self.kept if self.kept else 0.0


@dataclass(frozen=True, slots=True)
class PredictedQuestion:
    """A predicted question: what became of it, and whether users got its answer.

    `dropped` says why no answer is computed for it. `given` counts answers from it before a user asked it in these words,
    `asked` says whether one has.
    """

    question: str
    origin: PredictionOrigin
    dropped: DropReason | None
    given: int
    asked: bool


class PredictionStore:
    """The three tables together. Questions are passed as `clean_text` returns them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.summary = CorpusSummary(database)
        self.history = QuestionHistory(database)
        self.predicted = PredictedQuestions(database)

    def record_question(self, question: str) -> None:
        """Record that a user asked a question and got an answer."""
        with self._database.transaction():
            self.history.add(question)
            self.predicted.record_asked(question)

    def documents_changed(self, gone: Iterable[str]) -> list[str]:
        """Delete what came from versions that are gone, in this transaction; return the predicted questions deleted."""
        versions = list(gone)
        if not versions:
            return []
        with self._database.transaction():
            self.summary.delete(versions)
            return self.predicted.delete(versions)

    def clear(self) -> None:
        """Delete everything."""
        with self._database.transaction():
            self.summary.clear()
            self.history.clear()
            self.predicted.clear()


class CorpusSummary:
    """The tables `abstract_parts` and `abstract_chunks` of `database`, created if missing."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS abstract_parts (
            id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL, rounds INTEGER NOT NULL DEFAULT 0,
            made_at REAL NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS abstract_chunks (
            chunk TEXT PRIMARY KEY, version TEXT NOT NULL,
            part INTEGER NOT NULL REFERENCES abstract_parts (id) ON DELETE CASCADE) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS abstract_chunks_by_version ON abstract_chunks (version)",
        "CREATE INDEX IF NOT EXISTS abstract_chunks_by_part ON abstract_chunks (part)",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def missing(self, chunks: Iterable[ChunkRef]) -> list[ChunkRef]:
        """Return the chunks that no part covers."""
        covered = {name for (name,) in self._database.query("SELECT chunk FROM abstract_chunks")}
        return [chunk for chunk in chunks if chunk.name not in covered]

    def put(self, chunks: Sequence[ChunkRef], text: str) -> None:
        """Store the key content of a batch; an empty text if it has none, so that it is not summarised again.

        Call it in the transaction that has checked that the chunks are still listed.
        """
        with self._database.transaction():
            self._database.execute(
                "INSERT INTO abstract_parts (text, made_at) VALUES (?, ?)", (text, time.time())
            )
            ((part,),) = self._database.query("SELECT max(id) FROM abstract_parts")
            self._database.execute_many(
                "INSERT OR REPLACE INTO abstract_chunks VALUES (?, ?, ?)",
                [(chunk.name, chunk.version, part) for chunk in chunks],
            )

    def parts(self) -> list[SummaryPart]:
        """Return all parts with content, oldest first."""
        versions: dict[int, set[str]] = {}
        for part, version in self._database.query("SELECT part, version FROM abstract_chunks"):
            versions.setdefault(part, set()).add(version)
        rows = self._database.query(
            "SELECT id, text, rounds FROM abstract_parts WHERE text <> '' ORDER BY id"
        )
        return [
            SummaryPart(id_, text, frozenset(versions.get(id_, ())), rounds) for id_, text, rounds in rows
        ]

    def record_round(self, part: int) -> bool:
        """Count one round of predictions from a part; return False if the part is gone."""
        changed = self._database.execute(
            "UPDATE abstract_parts SET rounds = rounds + 1 WHERE id = ?", (part,)
        )
        return changed > 0

    def delete(self, versions: Iterable[str]) -> None:
        """Delete every part that covers a chunk of these versions."""
        self._database.execute(
            """DELETE FROM abstract_parts WHERE id IN
                 (SELECT part FROM abstract_chunks WHERE version IN (SELECT value FROM json_each(?)))""",
            (json.dumps(list(versions)),),
        )

    def clear(self) -> None:
        """Delete everything."""
        self._database.execute("DELETE FROM abstract_parts")


class QuestionHistory:
    """The table `question_history` of `database`, created if missing; it holds each question once."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS question_history (
            question TEXT PRIMARY KEY, number INTEGER NOT NULL, asked_at REAL NOT NULL) WITHOUT ROWID""",
        "CREATE TABLE IF NOT EXISTS question_history_seen (number INTEGER NOT NULL)",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def add(self, question: str) -> None:
        """Add a question that a user asked."""
        with self._database.transaction():
            number = self.last + 1
            self._database.execute(
                """INSERT INTO question_history VALUES (?, ?, ?)
                   ON CONFLICT (question) DO UPDATE SET number = excluded.number, asked_at = excluded.asked_at""",
                (question, number, time.time()),
            )
            self._database.execute(
                "DELETE FROM question_history WHERE number <= ?", (number - HISTORY_LIMIT,)
            )

    @property
    def last(self) -> int:
        """Number of the latest question; 0 before the first one."""
        ((number,),) = self._database.query("SELECT coalesce(max(number), 0) FROM question_history")
        return max(int(number), self._seen)

    @property
    def has_new(self) -> bool:
        """Whether users asked anything since questions were last predicted from the history."""
        return self.last > self._seen

    def recent(self, most: int) -> list[str]:
        """Return the latest questions, oldest of them first."""
        rows = self._database.query(
            "SELECT question FROM question_history ORDER BY number DESC LIMIT ?", (most,)
        )
        return [question for (question,) in reversed(rows)]

    def mark_seen(self, number: int) -> None:
        """Record that questions were predicted from everything up to this number."""
        with self._database.transaction():
            self._database.execute("DELETE FROM question_history_seen")
            self._database.execute("INSERT INTO question_history_seen VALUES (?)", (number,))

    def clear(self) -> None:
        """Delete every question."""
        with self._database.transaction():
            self._database.execute("DELETE FROM question_history")
            self._database.execute("DELETE FROM question_history_seen")

    @property
    def _seen(self) -> int:
        rows = self._database.query("SELECT number FROM question_history_seen")
        return int(rows[0][0]) if rows else 0


class PredictedQuestions:
    """The tables `predicted_questions` and `predicted_from` of `database`, created if missing."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS predicted_questions (
            question TEXT PRIMARY KEY, origin TEXT NOT NULL, made_at REAL NOT NULL, dropped TEXT,
            given INTEGER NOT NULL DEFAULT 0, asked INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
        """CREATE TABLE IF NOT EXISTS predicted_from (
            question TEXT NOT NULL REFERENCES predicted_questions (question) ON DELETE CASCADE, version TEXT NOT NULL,
            PRIMARY KEY (version, question)) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS predicted_from_by_question ON predicted_from (question)",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def add(
        self,
        question: str,
        origin: PredictionOrigin,
        versions: Iterable[str],
        dropped: DropReason | None = None,
    ) -> None:
        """Add a new prediction with the versions of the documents it was made from."""
        with self._database.transaction():
            self._database.execute(
                "INSERT OR IGNORE INTO predicted_questions (question, origin, made_at, dropped) VALUES (?, ?, ?, ?)",
                (question, origin, time.time(), dropped),
            )
            self._database.execute_many(
                "INSERT OR IGNORE INTO predicted_from VALUES (?, ?)",
                [(question, version) for version in set(versions)],
            )

    def contains(self, question: str) -> bool:
        """Return whether a question was predicted before, dropped or not."""
        return bool(self._database.query("SELECT 1 FROM predicted_questions WHERE question = ?", (question,)))

    def drop(self, question: str, reason: DropReason) -> bool:
        """Mark a predicted question as dropped; return False, and change nothing, if a user has asked it meanwhile."""
        changed = self._database.execute(
            "UPDATE predicted_questions SET dropped = ? WHERE question = ? AND NOT asked", (reason, question)
        )
        return changed > 0

    def record_hit(self, question: str) -> None:
        """Count an answer given to a user, if its question was predicted and no user had asked it before."""
        self._database.execute(
            "UPDATE predicted_questions SET given = given + 1 WHERE question = ? AND NOT asked", (question,)
        )

    def record_asked(self, question: str) -> None:
        """Record that a user asked a question in these words."""
        self._database.execute("UPDATE predicted_questions SET asked = 1 WHERE question = ?", (question,))

    def delete(self, versions: Iterable[str]) -> list[str]:
        """Delete and return the questions predicted from these versions that no user has asked."""
        values = (json.dumps(list(versions)),)
        condition = "version IN (SELECT value FROM json_each(?))"
        where = f"question IN (SELECT question FROM predicted_from WHERE {condition}) AND NOT asked"
        with self._database.transaction():
            rows = self._database.query(f"SELECT question FROM predicted_questions WHERE {where}", values)
            self._database.execute(f"DELETE FROM predicted_questions WHERE {where}", values)
            self._database.execute(f"DELETE FROM predicted_from WHERE {condition}", values)
        return [question for (question,) in rows]

    def latest(self, most: int) -> list[PredictedQuestion]:
        """Return the latest predictions, those that users made use of first."""
        rows = self._database.query(
            """SELECT question, origin, dropped, given, asked FROM predicted_questions
               ORDER BY (given > 0 OR asked) DESC, made_at DESC, question LIMIT ?""",
            (most,),
        )
        return [
            PredictedQuestion(question, origin, dropped, given, bool(asked))
            for question, origin, dropped, given, asked in rows
        ]

    def totals(self) -> PredictionTotals:
        """Return counts."""
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
        """Delete every prediction."""
        self._database.execute("DELETE FROM predicted_questions")
