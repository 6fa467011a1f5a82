"""The table of questions: each under its circumstances with its vector, and an answer or none yet.

All statements about single questions are here. Knows neither when an answer stops counting nor how much fits.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvweave.answer_cache.english.reading import read, readings_version
from kvweave.answer_cache.english.words import plain
from kvweave.answer_cache.records import AnswerSettings, CachedAnswer, PendingQuestion, Vector, Why
from kvweave.database import Database
from kvweave.types import Source

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS banked_questions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, circumstances TEXT NOT NULL, question TEXT NOT NULL,
        reading TEXT NOT NULL, vector BLOB NOT NULL, answer TEXT, sources TEXT NOT NULL DEFAULT '[]',
        chunks TEXT NOT NULL DEFAULT '[]', epoch INTEGER NOT NULL DEFAULT 0, made_at REAL NOT NULL,
        waiting TEXT, waiting_since REAL, uses INTEGER NOT NULL DEFAULT 0, weight REAL NOT NULL DEFAULT 0,
        last_used REAL NOT NULL, bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (circumstances, question))""",
    "CREATE INDEX IF NOT EXISTS banked_questions_by_reading ON banked_questions (circumstances, reading)",
    "CREATE INDEX IF NOT EXISTS banked_questions_by_weight ON banked_questions (weight, last_used, id, bytes)",
    """CREATE INDEX IF NOT EXISTS banked_questions_by_use ON banked_questions (circumstances, last_used)
         WHERE answer IS NOT NULL""",
    "CREATE INDEX IF NOT EXISTS banked_questions_waiting ON banked_questions (waiting_since) WHERE waiting IS NOT NULL",
    "CREATE TABLE IF NOT EXISTS bank_facts (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
)
_COLUMNS: Final = "id, question, vector, circumstances, answer, sources, chunks, epoch, made_at"
ROW_BYTES: Final = 512
"""What a question takes beside its own bytes: names, counters and its places in the indexes, generously."""


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer to write down: its text, the chunks that stood in the prompt, those found, and the documents' epoch."""

    text: str
    sources: Sequence[Source]
    chunks: Sequence[str]
    epoch: int


class Entries:
    """The tables `banked_questions` and `bank_facts` of `database`, made if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)
        if self.fact("readings") != readings_version():
            self._read_again()

    def fact(self, name: str) -> float:
        """A number that is kept about the bank; 0 if it was never set."""
        rows = self._database.query("SELECT value FROM bank_facts WHERE name = ?", (name,))
        return float(rows[0][0]) if rows else 0.0

    def raise_fact(self, name: str, by: float = 1) -> None:
        """Add to such a number."""
        self._database.execute(
            """INSERT INTO bank_facts VALUES (?, ?)
               ON CONFLICT (name) DO UPDATE SET value = value + excluded.value""",
            (name, by),
        )

    def put(
        self,
        question: str,
        circumstances: AnswerSettings,
        vector: Vector,
        answer: NewAnswer | None,
        why: Why | None,
    ) -> int:
        """Write a question down with an answer or waiting for one, in place of what it had; returns its id."""
        words, now = plain(question), time.time()
        sources = json.dumps([astuple(source) for source in answer.sources] if answer else [])
        chunks = json.dumps(list(answer.chunks) if answer else [])
        blob = np.ascontiguousarray(vector, dtype="<f4").tobytes()
        text = answer.text if answer else None
        size = (
            ROW_BYTES + len(blob) + sum(len(part.encode()) for part in (words, text or "", sources, chunks))
        )
        with self._database.transaction():
            self._database.execute(
                """INSERT INTO banked_questions
                     (circumstances, question, reading, vector, answer, sources, chunks, epoch, made_at,
                      waiting, waiting_since, last_used, bytes)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
                   ON CONFLICT (circumstances, question) DO UPDATE SET
                     vector = excluded.vector, answer = excluded.answer, sources = excluded.sources,
                     chunks = excluded.chunks, epoch = excluded.epoch, made_at = excluded.made_at,
                     waiting = excluded.waiting, waiting_since = excluded.waiting_since, bytes = excluded.bytes""",
                (
                    *(_told(circumstances), words, read(words).key, blob, text, sources, chunks),
                    *(answer.epoch if answer else 0, now, why, now if why else None, now, size),
                ),
            )
            rows = self._database.query(
                "SELECT id FROM banked_questions WHERE circumstances = ? AND question = ?",
                (_told(circumstances), words),
            )
        return int(rows[0][0])

    def knows(self, question: str, circumstances: AnswerSettings) -> bool:
        """Whether the question stands in the table in these very words, answered or not."""
        return bool(
            self._database.query(
                "SELECT 1 FROM banked_questions WHERE circumstances = ? AND question = ?",
                (_told(circumstances), plain(question)),
            )
        )

    def alike(self, question: str, circumstances: AnswerSettings) -> list[CachedAnswer]:
        """Answered questions of the same words or the same reading, the one in the same words first."""
        words = plain(question)
        rows = self._database.query(
            f"""SELECT {_COLUMNS} FROM banked_questions
                WHERE circumstances = ? AND reading = ? AND answer IS NOT NULL ORDER BY question <> ?, id""",
            (_told(circumstances), read(words).key, words),
        )
        return [_banked(row) for row in rows]

    def answered_before(self, epoch: int) -> Iterator[CachedAnswer]:
        """Answers whose chunks were last seen to be the best in an earlier epoch, the most used first."""
        ids = self._database.query(
            "SELECT id FROM banked_questions WHERE answer IS NOT NULL AND epoch < ? ORDER BY weight DESC, id",
            (epoch,),
        )
        for (id_,) in ids:
            cache_hit = self.answered(id_)
            if cache_hit is not None:
                yield cache_hit

    def waiting(self, most: int, whys: Iterable[Why] | None) -> list[PendingQuestion]:
        """Questions that wait for an answer, for these reasons or any, the longest waiting first."""
        rows = self._database.query(
            """SELECT question, circumstances, waiting, waiting_since FROM banked_questions
               WHERE waiting IS NOT NULL AND (? IS NULL OR waiting IN (SELECT value FROM json_each(?)))
               ORDER BY waiting_since, id LIMIT ?""",
            (*[None if whys is None else json.dumps(list(whys))] * 2, most),
        )
        return [
            PendingQuestion(question, _circumstances(told), why, since) for question, told, why, since in rows
        ]

    def prefilled(self, question: str, circumstances: AnswerSettings) -> None:
        """Note that an expected question waits for decoding alone."""
        self._database.execute(
            """UPDATE banked_questions SET waiting = 'prefilled'
               WHERE circumstances = ? AND question = ? AND waiting = 'predicted'""",
            (_told(circumstances), plain(question)),
        )

    def most_used(self) -> list[tuple[str, AnswerSettings]]:
        """Questions that have an answer, the most used first."""
        rows = self._database.query(
            """SELECT question, circumstances FROM banked_questions WHERE answer IS NOT NULL
               ORDER BY weight DESC, last_used DESC, id DESC"""
        )
        return [(question, _circumstances(told)) for question, told in rows]

    def vectors(self, circumstances: AnswerSettings) -> Iterator[tuple[str, Vector]]:
        """Every question under these circumstances, answered or not, with its vector."""
        rows = self._database.query(
            "SELECT question, vector FROM banked_questions WHERE circumstances = ?", (_told(circumstances),)
        )
        for question, blob in rows:
            yield question, _vector(blob)

    def lately_used(
        self, circumstances: AnswerSettings, most: int
    ) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Ids of so many answered questions, those used last, and their vectors (n, dimensions)."""
        rows = self._database.query(
            """SELECT id, vector FROM banked_questions WHERE id IN (
                 SELECT id FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL
                 ORDER BY last_used DESC LIMIT ?)""",
            (_told(circumstances), most),
        )
        vectors = np.frombuffer(b"".join(blob for _, blob in rows), dtype="<f4")
        return [int(id_) for id_, _ in rows], vectors.reshape(len(rows), -1 if rows else 0)

    def answered(self, id_: int) -> CachedAnswer | None:
        """A question by its id, if it has an answer."""
        rows = self._database.query(
            f"SELECT {_COLUMNS} FROM banked_questions WHERE id = ? AND answer IS NOT NULL", (id_,)
        )
        return _banked(rows[0]) if rows else None

    def delete(self, questions: Iterable[str], circumstances: AnswerSettings | None = None) -> None:
        """Delete questions under some circumstances or all, their answers with them."""
        self._database.execute(
            """DELETE FROM banked_questions WHERE question IN (SELECT value FROM json_each(?))
                 AND circumstances = coalesce(?, circumstances)""",
            (json.dumps(list(questions)), circumstances and _told(circumstances)),
        )

    def drop_answers(self, ids: Iterable[int], why: Why) -> int:
        """Forget the answers of some questions, which wait for new ones from now on; returns how many had one."""
        return self._database.execute(
            """UPDATE banked_questions SET answer = NULL, sources = '[]', chunks = '[]',
                 bytes = bytes - length(CAST(answer AS BLOB)) - length(sources) - length(chunks) + 4,
                 waiting = ?, waiting_since = ?
               WHERE answer IS NOT NULL AND id IN (SELECT value FROM json_each(?))""",
            (why, time.time(), json.dumps(list(ids))),
        )

    def move_epoch(self, id_: int, epoch: int) -> None:
        """Note that an answer's chunks are the best in this epoch too."""
        self._database.execute("UPDATE banked_questions SET epoch = max(epoch, ?) WHERE id = ?", (epoch, id_))

    def count(self) -> tuple[int, int, int, int]:
        """Questions, those with an answer, those waiting, and bytes."""
        rows = self._database.query(
            "SELECT count(*), count(answer), count(waiting), coalesce(sum(bytes), 0) FROM banked_questions"
        )
        questions, answered, waiting, size = rows[0]
        return int(questions), int(answered), int(waiting), int(size)

    def clear(self) -> None:
        """Delete every question; numbers about the bank stay."""
        self._database.execute("DELETE FROM banked_questions")

    def _read_again(self) -> None:
        """Questions read by another version of the reading are read anew."""
        with self._database.transaction():
            rows = self._database.query("SELECT id, question FROM banked_questions")
            self._database.execute_many(
                "UPDATE banked_questions SET reading = ? WHERE id = ?",
                [(read(text).key, id_) for id_, text in rows],
            )
            self._database.execute(
                "INSERT OR REPLACE INTO bank_facts VALUES ('readings', ?)", (readings_version(),)
            )


def _vector(blob: bytes) -> Vector:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32)


def _told(circumstances: AnswerSettings) -> str:
    return json.dumps(asdict(circumstances), sort_keys=True)


def _circumstances(told: str) -> AnswerSettings:
    return AnswerSettings(**json.loads(told))


def _banked(row: tuple[Any, ...]) -> CachedAnswer:
    id_, question, blob, told, text, sources, chunks, epoch, made_at = row
    return CachedAnswer(
        id=id_,
        question=question,
        vector=_vector(blob),
        circumstances=_circumstances(told),
        similarity=1.0,
        text=text,
        sources=tuple(Source(*source) for source in json.loads(sources)),
        chunks=tuple(json.loads(chunks)),
        epoch=epoch,
        made_at_s=made_at,
    )
