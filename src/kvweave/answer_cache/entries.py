"""The table of questions: each with its options, its vector, and an answer or none yet.

Holds all statements about single questions. Does not decide when an answer is invalid or what is evicted.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, NamedTuple

from kvweave.answer_cache.matching import Matcher
from kvweave.answer_cache.neighbours import Neighbours
from kvweave.answer_cache.records import (
    CachedAnswer,
    PendingQuestion,
    PendingReason,
    Vector,
)
from kvweave.database import Database
from kvweave.options import AskOptions
from kvweave.results import Source
from kvweave.text import clean_text

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
    """CREATE INDEX IF NOT EXISTS banked_questions_by_making ON banked_questions (circumstances, made_at)
         WHERE answer IS NOT NULL""",
    "CREATE INDEX IF NOT EXISTS banked_questions_waiting ON banked_questions (waiting_since) WHERE waiting IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS answers_ahead (
        question INTEGER PRIMARY KEY REFERENCES banked_questions (id) ON DELETE CASCADE, seconds REAL NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS bank_facts (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
)
# Column names are stored: `circumstances` holds `AskOptions.cache_key`, `reading` the matcher's key, `waiting` the reason
# why a question is pending.
_COLUMNS: Final = "id, question, vector, circumstances, answer, sources, chunks, epoch, made_at"
_MATCHER_VERSION: Final = "readings"
ROW_BYTES: Final = 512
"""Size of a row beside its texts and vector: counters, and its places in the indexes. A generous estimate."""

_MOST_NARROWER: Final = 32
"""How many smaller values of `top_k` are looked at: answers to a small knowledge base were once stored under the number of
its chunks."""


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer to store: text, chunks of the prompt, names of the retrieved chunks, epoch of the document list."""

    text: str
    sources: Sequence[Source]
    chunks: Sequence[str]
    epoch: int


class EntryCounts(NamedTuple):
    """Numbers of questions, of those with an answer, of those waiting for one; and their size."""

    questions: int
    answered: int
    waiting: int
    bytes: int


class Entries:
    """The tables `banked_questions` and `bank_facts` of `database`, created if missing."""

    def __init__(self, database: Database, matcher: Matcher) -> None:
        self._database = database
        self._matcher = matcher
        self._neighbours = Neighbours(database)
        database.script(_SCHEMA)
        if self.counter(_MATCHER_VERSION) != matcher.version:
            self._recompute_keys()

    # Numbers about the whole table

    def counter(self, name: str) -> float:
        """Return a stored number about the cache, 0 by default."""
        rows = self._database.query("SELECT value FROM bank_facts WHERE name = ?", (name,))
        return float(rows[0][0]) if rows else 0.0

    def increase(self, name: str, by: float = 1) -> None:
        """Add to such a number."""
        self._database.execute(
            """INSERT INTO bank_facts VALUES (?, ?)
               ON CONFLICT (name) DO UPDATE SET value = value + excluded.value""",
            (name, by),
        )

    def count(self) -> EntryCounts:
        """Return the numbers of questions and their size."""
        rows = self._database.query(
            "SELECT count(*), count(answer), count(waiting), coalesce(sum(bytes), 0) FROM banked_questions"
        )
        return EntryCounts(*(int(value) for value in rows[0]))

    # Writing

    def put(
        self,
        question: str,
        options: AskOptions,
        vector: Vector,
        answer: NewAnswer | None,
        reason: PendingReason | None,
    ) -> int:
        """Store a question with its answer, or pending for a reason, in place of an earlier row; return its id."""
        text, now = clean_text(question), time.time()
        sources = json.dumps([astuple(source) for source in answer.sources] if answer else [])
        chunks = json.dumps(list(answer.chunks) if answer else [])
        blob = _numpy().ascontiguousarray(vector, dtype="<f4").tobytes()
        answer_text = answer.text if answer else None
        texts = (text, answer_text or "", sources, chunks)
        size = ROW_BYTES + len(blob) + sum(len(part.encode()) for part in texts)
        key = self._matcher.key(text)
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
                    *(options.cache_key(), text, key, blob, answer_text, sources, chunks),
                    *(answer.epoch if answer else 0, now, reason, now if reason else None, now, size),
                ),
            )
            rows = self._database.query(
                "SELECT id FROM banked_questions WHERE circumstances = ? AND question = ?",
                (options.cache_key(), text),
            )
        return int(rows[0][0])

    def set_ahead(self, id_: int, seconds: float | None) -> None:
        """Record the seconds that computing an answer ahead took; None if its user waited for it."""
        if seconds is None:
            self._database.execute("DELETE FROM answers_ahead WHERE question = ?", (id_,))
        else:
            self._database.execute("INSERT OR REPLACE INTO answers_ahead VALUES (?, ?)", (id_, seconds))

    def ahead_s(self, id_: int) -> float | None:
        """Return the seconds that computing an answer ahead took, or None if its user waited for it."""
        rows = self._database.query("SELECT seconds FROM answers_ahead WHERE question = ?", (id_,))
        return float(rows[0][0]) if rows else None

    def mark_prefilled(self, question: str, options: AskOptions) -> None:
        """Record that a predicted question's KV is computed and only its answer is missing."""
        self._database.execute(
            """UPDATE banked_questions SET waiting = 'prefilled'
               WHERE circumstances = ? AND question = ? AND waiting = 'predicted'""",
            (options.cache_key(), clean_text(question)),
        )

    def drop_answers(self, ids: Iterable[int], reason: PendingReason) -> int:
        """Delete the answers of some questions, which become pending; return the number of deleted answers."""
        return self._database.execute(
            """UPDATE banked_questions SET answer = NULL, sources = '[]', chunks = '[]',
                 bytes = bytes - length(CAST(answer AS BLOB)) - length(sources) - length(chunks) + 4,
                 waiting = ?, waiting_since = ?
               WHERE answer IS NOT NULL AND id IN (SELECT value FROM json_each(?))""",
            (reason, time.time(), json.dumps(list(ids))),
        )

    def raise_epoch(self, id_: int, epoch: int) -> None:
        """Record that an answer's chunks are the best ones in this epoch too."""
        self._database.execute("UPDATE banked_questions SET epoch = max(epoch, ?) WHERE id = ?", (epoch, id_))

    def move(self, id_: int, options: AskOptions) -> None:
        """Put a question under other options, in place of a question in the same words that has no answer there."""
        moved_to = options.cache_key()
        with self._database.transaction():
            self._database.execute(
                """DELETE FROM banked_questions WHERE circumstances = ? AND answer IS NULL
                     AND question = (SELECT question FROM banked_questions WHERE id = ?)""",
                (moved_to, id_),
            )
            self._database.execute(
                "UPDATE OR IGNORE banked_questions SET circumstances = ? WHERE id = ?", (moved_to, id_)
            )

    def delete(self, questions: Iterable[str], options: AskOptions | None = None) -> None:
        """Delete questions with their answers, under these options or under any."""
        self._database.execute(
            """DELETE FROM banked_questions WHERE question IN (SELECT value FROM json_each(?))
                 AND circumstances = coalesce(?, circumstances)""",
            (json.dumps(list(questions)), options and options.cache_key()),
        )

    def clear(self) -> None:
        """Delete every question; the numbers about the cache stay."""
        self._database.execute("DELETE FROM banked_questions")

    # Reading

    def contains(self, question: str, options: AskOptions) -> bool:
        """Return whether the table holds a question in exactly these words, answered or not."""
        return self.id_of(question, options) is not None

    def id_of(self, question: str, options: AskOptions) -> int | None:
        """Return the id of a question in exactly these words, answered or not, or None."""
        rows = self._database.query(
            "SELECT id FROM banked_questions WHERE circumstances = ? AND question = ?",
            (options.cache_key(), clean_text(question)),
        )
        return int(rows[0][0]) if rows else None

    def get(self, id_: int) -> CachedAnswer | None:
        """Return the answer to a question by its id, or None."""
        rows = self._database.query(
            f"SELECT {_COLUMNS} FROM banked_questions WHERE id = ? AND answer IS NOT NULL", (id_,)
        )
        return _cached_answer(rows[0]) if rows else None

    def candidates(self, question: str, options: AskOptions) -> list[CachedAnswer]:
        """Return the answers to questions with the same key, first the one to exactly the same words."""
        text = clean_text(question)
        rows = self._database.query(
            f"""SELECT {_COLUMNS} FROM banked_questions
                WHERE circumstances = ? AND reading = ? AND answer IS NOT NULL ORDER BY question <> ?, id""",
            (options.cache_key(), self._matcher.key(text), text),
        )
        return [_cached_answer(row) for row in rows]

    def has_answers(self, options: AskOptions) -> bool:
        """Return whether any question under these options has an answer."""
        return bool(
            self._database.query(
                "SELECT 1 FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL LIMIT 1",
                (options.cache_key(),),
            )
        )

    def neighbours(
        self, question: str, vector: Vector, options: AskOptions, most: int, at_least: float
    ) -> list[tuple[CachedAnswer, float]]:
        """Return the answers to the most similar questions, each with its cosine: first by vector (dimensions,), then by letters."""
        near = self._neighbours.nearest(clean_text(question), vector, options.cache_key(), most, at_least)
        answers = ((self.get(id_), cosine) for id_, cosine in near)
        return [(answer, cosine) for answer, cosine in answers if answer is not None]

    def answered_before(self, epoch: int) -> Iterator[CachedAnswer]:
        """Yield answers whose chunks were last the best ones in an earlier epoch, most used first."""
        ids = self._database.query(
            "SELECT id FROM banked_questions WHERE answer IS NOT NULL AND epoch < ? ORDER BY weight DESC, id",
            (epoch,),
        )
        for (id_,) in ids:
            answer = self.get(id_)
            if answer is not None:
                yield answer

    def narrower(self, options: AskOptions) -> list[AskOptions]:
        """Return the options that differ in a smaller `top_k` alone and have an answer, the greatest `top_k` first."""
        smaller = [replace(options, top_k=top_k).cache_key() for top_k in _smaller(options.top_k)]
        rows = self._database.query(
            """SELECT value FROM json_each(?) WHERE EXISTS
                 (SELECT 1 FROM banked_questions WHERE circumstances = value AND answer IS NOT NULL)""",
            (json.dumps(smaller),),
        )
        found = [AskOptions.from_key(key) for (key,) in rows]
        return sorted(found, key=lambda each: -each.top_k)

    def pending(
        self, most: int, reasons: Iterable[PendingReason] | None, without: Iterable[str] = ()
    ) -> list[PendingQuestion]:
        """Return pending questions, the longest pending first: for `reasons` or for any, leaving out those of `without`."""
        rows = self._database.query(
            """SELECT question, circumstances, waiting, waiting_since FROM banked_questions
               WHERE waiting IS NOT NULL AND (? IS NULL OR waiting IN (SELECT value FROM json_each(?)))
                 AND question NOT IN (SELECT value FROM json_each(?))
               ORDER BY waiting_since, id LIMIT ?""",
            (
                *[None if reasons is None else json.dumps(list(reasons))] * 2,
                json.dumps(list(without)),
                most,
            ),
        )
        return [
            PendingQuestion(question, AskOptions.from_key(key), reason, since)
            for question, key, reason, since in rows
        ]

    def most_used(self) -> list[tuple[str, AskOptions]]:
        """Return the questions that have an answer, most used first."""
        rows = self._database.query(
            """SELECT question, circumstances FROM banked_questions WHERE answer IS NOT NULL
               ORDER BY weight DESC, last_used DESC, id DESC"""
        )
        return [(question, AskOptions.from_key(key)) for question, key in rows]

    def vectors(self, options: AskOptions) -> Iterator[tuple[str, Vector]]:
        """Yield every question under these options, answered or not, with its vector."""
        rows = self._database.query(
            "SELECT question, vector FROM banked_questions WHERE circumstances = ?", (options.cache_key(),)
        )
        for question, blob in rows:
            yield question, _vector(blob)

    def recently_used(self, options: AskOptions, most: int) -> tuple[list[int], Vector]:
        """Return ids and vectors (n, dimensions) of the answered questions that were used last, at most `most`."""
        rows = self._database.query(
            """SELECT id, vector FROM banked_questions WHERE id IN (
                 SELECT id FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL
                 ORDER BY last_used DESC LIMIT ?)""",
            (options.cache_key(), most),
        )
        vectors = _numpy().frombuffer(b"".join(blob for _, blob in rows), dtype="<f4")
        return [int(id_) for id_, _ in rows], vectors.reshape(len(rows), -1 if rows else 0)

    def _recompute_keys(self) -> None:
        """Replace the keys that another version of the matcher computed."""
        with self._database.transaction():
            rows = self._database.query("SELECT id, question FROM banked_questions")
            self._database.execute_many(
                "UPDATE banked_questions SET reading = ? WHERE id = ?",
                [(self._matcher.key(text), id_) for id_, text in rows],
            )
            self._database.execute(
                "INSERT OR REPLACE INTO bank_facts VALUES (?, ?)", (_MATCHER_VERSION, self._matcher.version)
            )


def _numpy() -> Any:
    """Import numpy where vectors are read or written: listing documents takes half as long without it."""
    import numpy

    return numpy


def _vector(blob: bytes) -> Vector:
    np = _numpy()
    vector: Vector = np.frombuffer(blob, dtype="<f4").astype(np.float32)
    return vector


def _smaller(top_k: int) -> range:
    """Return the smaller values of `top_k` that answers are looked for under: the nearest ones."""
    return range(max(1, top_k - _MOST_NARROWER), top_k)


def _cached_answer(row: tuple[Any, ...]) -> CachedAnswer:
    id_, question, blob, key, text, sources, chunks, epoch, made_at = row
    return CachedAnswer(
        id=id_,
        question=question,
        vector=_vector(blob),
        options=AskOptions.from_key(key),
        similarity=1.0,
        text=text,
        sources=tuple(Source(*source) for source in json.loads(sources)),
        chunks=tuple(json.loads(chunks)),
        epoch=epoch,
        made_at_s=made_at,
    )
