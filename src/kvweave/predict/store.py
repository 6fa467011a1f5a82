"""What a knowledge base knows about questions to come: the abstract, the history, and what was predicted from them.

Lives in the knowledge base's own database, so that what a document has told goes in the commit that takes it out.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvweave.database import Database

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


@dataclass(frozen=True, slots=True)
class ChunkName:
    """A listed chunk: its name in the index, the version of its document, and its tokens."""

    name: str
    version: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """Key content of some chunks, the versions of their documents, and how often questions were predicted from it."""

    id: int
    text: str
    versions: frozenset[str]
    rounds: int


class CorpusSummary:
    """The tables `abstract_parts` and `abstract_chunks` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def lacking(self, chunks: Iterable[ChunkName]) -> list[ChunkName]:
        """Those of some chunks that no part was made from."""
        covered = {name for (name,) in self._database.query("SELECT chunk FROM abstract_chunks")}
        return [chunk for chunk in chunks if chunk.name not in covered]

    def put(self, chunks: Sequence[ChunkName], text: str) -> None:
        """Write down the key content of a batch; nothing where it has none, so that it is not asked for again.

        Call it in the transaction that has seen that the chunks are still listed.
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

    def parts(self) -> list[Part]:
        """All parts that say something, the oldest first."""
        versions: dict[int, set[str]] = {}
        for part, version in self._database.query("SELECT part, version FROM abstract_chunks"):
            versions.setdefault(part, set()).add(version)
        rows = self._database.query(
            "SELECT id, text, rounds FROM abstract_parts WHERE text <> '' ORDER BY id"
        )
        return [Part(id_, text, frozenset(versions.get(id_, ())), rounds) for id_, text, rounds in rows]

    def used(self, part: int) -> bool:
        """Count one round of predictions from a part; False if it is gone."""
        changed = self._database.execute(
            "UPDATE abstract_parts SET rounds = rounds + 1 WHERE id = ?", (part,)
        )
        return changed > 0

    def forget(self, versions: Iterable[str]) -> None:
        """Drop every part that something of these versions went into."""
        self._database.execute(
            """DELETE FROM abstract_parts WHERE id IN
                 (SELECT part FROM abstract_chunks WHERE version IN (SELECT value FROM json_each(?)))""",
            (json.dumps(list(versions)),),
        )

    def clear(self) -> None:
        """Drop everything."""
        self._database.execute("DELETE FROM abstract_parts")


KEPT: Final = 64
"""Questions in the buffer; an earlier one is forgotten."""

_SCHEMA_history: Final = (
    """CREATE TABLE IF NOT EXISTS question_history (
        question TEXT PRIMARY KEY, number INTEGER NOT NULL, asked_at REAL NOT NULL) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS question_history_seen (number INTEGER NOT NULL)",
)


class QuestionHistory:
    """The table `question_history` of `database`, made if it is not there; each question stands in it once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA_history)

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


Origin: TypeAlias = Literal["knowledge", "history"]
"""What a question was predicted from: the abstract alone, or earlier questions too."""
Dropped: TypeAlias = Literal["unanswerable"]
"""Why a predicted question is not kept: nothing that was found says anything about it, or the model said so."""

_SCHEMA_ledger: Final = (
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


class PredictedQuestions:
    """The tables `predicted_questions` and `predicted_from` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA_ledger)

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


class PredictionStore:
    """`abstract`, `history` and `ledger` in `database`. Questions are given as the answer bank has them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.abstract = CorpusSummary(database)
        self.history = QuestionHistory(database)
        self.ledger = PredictedQuestions(database)

    def asked(self, question: str) -> None:
        """A user has asked this, and has an answer."""
        with self._database.transaction():
            self.history.add(question)
            self.ledger.asked(question)

    def documents_changed(self, gone: Iterable[str]) -> list[str]:
        """Versions leave the list of documents in this transaction; returns predicted questions to be forgotten."""
        versions = list(gone)
        if not versions:
            return []
        with self._database.transaction():
            self.abstract.forget(versions)
            return self.ledger.forget(versions)

    def clear(self) -> None:
        """Forget everything."""
        with self._database.transaction():
            self.abstract.clear()
            self.history.clear()
            self.ledger.clear()
