"""The stored data of question prediction: a summary of the documents, the questions asked, and the questions predicted.

It is part of the knowledge base's own database, so the commit that removes a document also deletes what came from it.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

from kvweave.database import Database, FactTable

HISTORY_LIMIT: Final = 64
"""The most questions in the history; earlier ones are deleted."""

_TABLES: Final = (
    *("abstract_parts", "abstract_drops", "question_history", "question_history_seen", "predicted_questions"),
)
"""Deleting their rows also deletes those of the other tables, which refer to these."""

PredictionOrigin: TypeAlias = Literal["knowledge", "history"]
"""What a question was predicted from: the documents alone, or earlier questions too."""

DropReason: TypeAlias = Literal[
    "repetition",
    "unclear",
    "other language",
    "unanswerable",
    "unknown words",
    "no answer",
    "names its answer",
    "unsupported",
]
"""Why a predicted question was dropped.

repetition: it goes round in circles; unclear: "he" or "this" in it stands for nothing that it names; other language: than the
documents; unanswerable: no retrieved chunk is about it; unknown words: the documents have no such words; no answer: the
model had none; names its answer: it holds the answer that it was made for; unsupported: the retrieved chunks do not say what the
model answered, or it is not the answer that the question was made for.
"""


@dataclass(frozen=True, slots=True)
class PredictionTotals:
    """Totals of question prediction.

    Attributes:
        predicted: number of questions kept, by origin.
        dropped: number of questions dropped, and `reasons` by reason.
        served: number of kept questions whose answer a user got at least once.
        given: number of times that users got such answers.
    """

    predicted: dict[str, int]
    dropped: int
    served: int
    given: int
    reasons: dict[str, int]

    @property
    def kept(self) -> int:
        """Number of questions kept."""
        return sum(self.predicted.values())

    @property
    def given_per_question(self) -> float:
        """Answers given per predicted question; 0 without any."""
        return self.given / self.kept if self.kept else 0.0


@dataclass(frozen=True, slots=True)
class PredictionCounts:
    """What predictions were worth since the knowledge base was made, also those whose documents are gone.

    Attributes:
        made: questions predicted, and `dropped` those of them that were not worth an answer.
        asked: predicted questions that users asked, in the same words or in others.
        served: answers given from predicted questions before a user had asked these in their own words.
        rejected: answers among these to which users said no.
    """

    made: int
    dropped: int
    asked: int
    served: int
    rejected: int


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


class PredictionStore:
    """The tables of question prediction. Questions are passed as `clean_text` returns them."""

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
        """Delete everything made from versions that are gone, in this transaction; return the deleted questions."""
        versions = list(gone)
        if not versions:
            return []
        with self._database.transaction():
            self.summary.delete(versions)
            return self.predicted.delete(versions)

    def clear(self) -> None:
        """Delete everything."""
        with self._database.transaction():
            for table in _TABLES:
                self._database.execute(f"DELETE FROM {table}")


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
        "CREATE TABLE IF NOT EXISTS abstract_drops (reason TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def missing(self, chunks: Iterable[ChunkRef]) -> list[ChunkRef]:
        """Return the chunks that no part covers."""
        covered = {name for (name,) in self._database.query("SELECT chunk FROM abstract_chunks")}
        return [chunk for chunk in chunks if chunk.name not in covered]

    def put(self, chunks: Sequence[ChunkRef], text: str) -> None:
        """Store the key content of a batch. An empty text marks a batch without any, so that it is not summarised again.

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

    def record_drop(self, reason: str) -> None:
        """Count a summary that was dropped."""
        self._database.execute(
            """INSERT INTO abstract_drops VALUES (?, 1)
               ON CONFLICT (reason) DO UPDATE SET number = number + 1""",
            (reason,),
        )

    def drops(self) -> dict[str, int]:
        """Return the number of dropped summaries by reason."""
        rows = self._database.query("SELECT reason, number FROM abstract_drops ORDER BY reason")
        return {reason: int(number) for reason, number in rows}

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

    @property
    def _seen(self) -> int:
        rows = self._database.query("SELECT number FROM question_history_seen")
        return int(rows[0][0]) if rows else 0


class PredictedQuestions:
    """The tables of predicted questions, created if missing."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS predicted_questions (
            question TEXT PRIMARY KEY, origin TEXT NOT NULL, made_at REAL NOT NULL, dropped TEXT,
            given INTEGER NOT NULL DEFAULT 0, asked INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID""",
        """CREATE TABLE IF NOT EXISTS predicted_from (
            question TEXT NOT NULL REFERENCES predicted_questions (question) ON DELETE CASCADE, version TEXT NOT NULL,
            PRIMARY KEY (version, question)) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS predicted_from_by_question ON predicted_from (question)",
        """CREATE TABLE IF NOT EXISTS predicted_answers (
            question TEXT PRIMARY KEY REFERENCES predicted_questions (question) ON DELETE CASCADE,
            answer TEXT NOT NULL) WITHOUT ROWID""",
        # Of earlier versions; the first keeps questions about deleted documents.
        "DROP TABLE IF EXISTS paraphrased_questions",
        "DROP TABLE IF EXISTS prediction_worth",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts = FactTable(database, "prediction_counts")
        database.script(self._SCHEMA)

    def add(
        self,
        question: str,
        origin: PredictionOrigin,
        versions: Iterable[str],
        dropped: DropReason | None = None,
        answer: str = "",
    ) -> None:
        """Add a prediction with the versions of its documents and, if it was made for one, its answer."""
        with self._database.transaction():
            new = self._database.execute(
                "INSERT OR IGNORE INTO predicted_questions (question, origin, made_at, dropped) VALUES (?, ?, ?, ?)",
                (question, origin, time.time(), dropped),
            )
            self._counts.add("made", new)
            self._counts.add("dropped", new * (dropped is not None))
            self._database.execute_many(
                "INSERT OR IGNORE INTO predicted_from VALUES (?, ?)",
                [(question, version) for version in set(versions)],
            )
            if answer:
                self._database.execute(
                    "INSERT OR IGNORE INTO predicted_answers VALUES (?, ?)", (question, answer)
                )

    def wanted_answer(self, question: str) -> str:
        """Return the answer that a question was made for, or an empty text if the model chose the subject."""
        rows = self._database.query("SELECT answer FROM predicted_answers WHERE question = ?", (question,))
        return str(rows[0][0]) if rows else ""

    def contains(self, question: str) -> bool:
        """Return whether a question was predicted before, dropped or not."""
        return bool(self._database.query("SELECT 1 FROM predicted_questions WHERE question = ?", (question,)))

    def drop(self, question: str, reason: DropReason) -> bool:
        """Mark a predicted question as dropped; return False, and change nothing, if a user has asked it meanwhile."""
        with self._database.transaction():
            changed = self._database.execute(
                "UPDATE predicted_questions SET dropped = ? WHERE question = ? AND NOT asked",
                (reason, question),
            )
            self._counts.add("dropped", changed)
        return changed > 0

    def record_hit(self, question: str) -> None:
        """Count an answer given to a user, if its question was predicted and no user had asked it before."""
        with self._database.transaction():
            self._count_asked(question)
            served = self._database.execute(
                "UPDATE predicted_questions SET given = given + 1 WHERE question = ? AND NOT asked",
                (question,),
            )
            self._counts.add("served", served)

    def record_asked(self, question: str) -> None:
        """Record that a user asked a question in these words."""
        with self._database.transaction():
            self._count_asked(question)
            self._database.execute("UPDATE predicted_questions SET asked = 1 WHERE question = ?", (question,))

    def record_rejection(self, questions: Iterable[str]) -> None:
        """Count that a user said no to the answers to these questions, those of them that were predicted."""
        self._counts.add("rejected", sum(map(self.contains, questions)))

    def counts(self) -> PredictionCounts:
        """Return what predictions were worth so far."""
        return PredictionCounts(*(int(self._counts.get(each.name) or 0) for each in fields(PredictionCounts)))

    def _count_asked(self, question: str) -> None:
        """Count a predicted question that a user asks for the first time."""
        rows = self._database.query(
            "SELECT 1 FROM predicted_questions WHERE question = ? AND NOT asked AND given = 0", (question,)
        )
        self._counts.add("asked", len(rows))

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
        """Return the latest predictions, first those whose answers users got."""
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
        reasons = self._database.query(
            """SELECT dropped, count(*) FROM predicted_questions WHERE dropped IS NOT NULL
               GROUP BY dropped ORDER BY dropped"""
        )
        return PredictionTotals(
            predicted={origin: int(kept) for origin, kept, *_ in rows},
            dropped=sum(int(dropped) for _, _, dropped, _, _ in rows),
            served=sum(int(served) for *_, served, _ in rows),
            given=sum(int(given) for *_, given in rows),
            reasons={reason: int(number) for reason, number in reasons},
        )
