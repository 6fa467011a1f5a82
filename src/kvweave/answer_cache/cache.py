"""The answer bank of a knowledge base: questions that were asked, their answers, and what these rest on.

It lives in the knowledge base's own database, so that the commit that changes a document is the commit after which no
answer from it is given. Never calls a model: vectors come with the questions.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from kvweave.answer_cache.english.reading import read
from kvweave.answer_cache.english.words import plain
from kvweave.answer_cache.entries import Entries, NewAnswer
from kvweave.answer_cache.matching import same_question, similarity
from kvweave.answer_cache.records import (
    AnswerCacheTotals,
    AnswerSettings,
    CachedAnswer,
    PendingQuestion,
    Provenance,
    Vector,
    Why,
)
from kvweave.database import Database
from kvweave.types import Source

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS answer_versions (
        version TEXT NOT NULL, question INTEGER NOT NULL REFERENCES banked_questions (id) ON DELETE CASCADE,
        PRIMARY KEY (version, question)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS answer_versions_by_question ON answer_versions (question)",
)
_EPOCH: Final = "epoch"


class Invalidation:
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


_AGE: Final = "age"
_PAGE_ROWS: Final = 256


class Eviction:
    """Weights and sizes in the table of questions, under a cap of `limit_bytes`."""

    def __init__(self, database: Database, entries: Entries, limit_bytes: int) -> None:
        self._database = database
        self._entries = entries
        self.limit_bytes = limit_bytes

    def used(self, id_: int) -> None:
        """Count one use of a question, or its arrival."""
        self._database.execute(
            """UPDATE banked_questions SET uses = uses + 1, last_used = ?,
                 weight = uses + 1 + coalesce((SELECT value FROM bank_facts WHERE name = ?), 0) WHERE id = ?""",
            (time.time(), _AGE, id_),
        )

    def expected(self, id_: int) -> None:
        """A question arrives that nobody has asked: it weighs less than any that somebody has, and goes before those."""
        self._database.execute(
            """UPDATE banked_questions SET last_used = ?,
                 weight = coalesce((SELECT value FROM bank_facts WHERE name = ?), 0) WHERE id = ?""",
            (time.time(), _AGE, id_),
        )

    def make(self) -> int:
        """Delete the lightest questions until the rest is within the cap; returns how many went."""
        with self._database.transaction():
            gone = 0
            while (excess := self._entries.count()[3] - self.limit_bytes) > 0:
                victims, heaviest = self._lightest(excess)
                self._database.execute(
                    "DELETE FROM banked_questions WHERE id IN (SELECT value FROM json_each(?))",
                    (json.dumps(victims),),
                )
                self._entries.raise_fact(_AGE, max(0.0, heaviest - self._entries.fact(_AGE)))
                gone += len(victims)
        return gone

    def _lightest(self, excess_bytes: int) -> tuple[list[int], float]:
        """The first of all questions by weight that free so much, as far as one page reaches, and the last one's weight."""
        rows = self._database.query(
            "SELECT id, weight, bytes FROM banked_questions ORDER BY weight, last_used, id LIMIT ?",
            (_PAGE_ROWS,),
        )
        victims: list[int] = []
        heaviest = 0.0
        for id_, weight, size in rows:
            victims.append(id_)
            heaviest = weight
            excess_bytes -= size
            if excess_bytes <= 0:
                break
        return victims, heaviest


_COMPARED: Final = 2048
"""Of so many questions the nearest one's answer is looked for: a few milliseconds."""


class AnswerCache:
    """Questions and answers in `database`; several processes and threads may use one at once.

    Args:
        database: of the knowledge base.
        limit_bytes: cap of what the bank holds; 0 means that nothing is kept, and nothing given.
    """

    def __init__(self, database: Database, limit_bytes: int) -> None:
        self._database = database
        self._entries = Entries(database)
        self._freshness = Invalidation(database, self._entries)
        self._room = Eviction(database, self._entries, limit_bytes)

    @property
    def limit_bytes(self) -> int:
        """The cap."""
        return self._room.limit_bytes

    @property
    def epoch(self) -> int:
        """How often the list of documents has changed; read it before looking anything up that `put` is to rest on."""
        return self._freshness.epoch

    def transaction(self) -> AbstractContextManager[None]:
        """Everything inside commits together, as in `Database.transaction`."""
        return self._database.transaction()

    def find(
        self, question: str, vector: Callable[[], Vector], circumstances: AnswerSettings, threshold: float
    ) -> CachedAnswer | None:
        """The answer to the nearest question that is the same; None if there is none.

        Whether an answer of an earlier epoch still rests on the best chunks is for the caller to see.

        Args:
            question: as it was asked.
            vector: gives its vector (dimensions,) of length 1; called only if that is needed.
            circumstances: under which it is asked.
            threshold: τ, 0..1; the very same words need no similarity.
        """
        reading = read(question)
        if reading.bound_to_now or not self.limit_bytes:
            return None
        alike = self._entries.alike(question, circumstances)
        if alike and alike[0].question == plain(question):
            return alike[0]
        best: CachedAnswer | None = None
        for candidate in alike:
            cosine = similarity(vector(), candidate.vector)
            nearer = best is None or cosine > best.similarity
            if nearer and same_question(reading, read(candidate.question), cosine, threshold):
                best = replace(candidate, similarity=cosine)
        return best

    def nearest(self, vector: Vector, circumstances: AnswerSettings, threshold: float) -> CachedAnswer | None:
        """The answer to the question that is nearest to a vector (dimensions,), whatever that asks for: what the answer may be.

        Of those that were used last; None if none has a cosine of at least `threshold`.
        """
        ids, vectors = self._entries.lately_used(circumstances, _COMPARED)
        if not ids:
            return None
        cosines = vectors @ vector
        best = int(cosines.argmax())
        if cosines[best] < threshold:
            return None
        cache_hit = self._entries.answered(ids[best])
        return None if cache_hit is None else replace(cache_hit, similarity=float(cosines[best]))

    def put(
        self,
        question: str,
        vector: Vector,
        circumstances: AnswerSettings,
        text: str,
        sources: Iterable[Source],
        rests_on: Provenance,
        asked: bool = True,
    ) -> bool:
        """Keep an answer, in place of an earlier one to the same words; False if it is not worth keeping.

        Call it in the transaction that has seen that the documents it rests on are still there. What depends on the
        moment it was asked in is not kept, nor an empty answer. An answer that nobody has `asked` for just now, being
        computed ahead, is no use of its question.
        """
        if not (text and self.limit_bytes) or read(question).bound_to_now:
            return False
        answer = NewAnswer(text, tuple(sources), rests_on.chunks, rests_on.epoch)
        with self._database.transaction():
            id_ = self._entries.put(question, circumstances, vector, answer, None)
            self._freshness.rests_on(id_, rests_on.versions)
            if asked:
                self._room.used(id_)
            self._room.make()
        return True

    def expect(self, question: str, vector: Vector, circumstances: AnswerSettings) -> None:
        """Let a question wait that nobody has asked yet; one that the bank has already stays as it is."""
        if not self.limit_bytes:
            return
        with self._database.transaction():
            if not self._entries.knows(question, circumstances):
                self._room.expected(self._entries.put(question, circumstances, vector, None, "predicted"))
                self._room.make()

    def prefilled(self, question: str, circumstances: AnswerSettings) -> None:
        """Note of an expected question that its KV is there, and only its answer is missing."""
        self._entries.prefilled(question, circumstances)

    def forget(self, questions: Iterable[str], circumstances: AnswerSettings | None = None) -> None:
        """Delete questions with their answers, under some circumstances or all."""
        self._entries.delete(questions, circumstances)

    def near(
        self, vector: Vector, circumstances: AnswerSettings, threshold: float
    ) -> list[tuple[str, float]]:
        """Every question, answered or not, whose cosine with a vector (dimensions,) is at least `threshold`, and that.

        Compares with all of them: for whoever has time.
        """
        found = (
            (question, similarity(vector, other)) for question, other in self._entries.vectors(circumstances)
        )
        return [(question, cosine) for question, cosine in found if cosine >= threshold]

    def most_used(self) -> list[tuple[str, AnswerSettings]]:
        """Questions that have an answer, the most used first."""
        return self._entries.most_used()

    def given(self, cache_hit: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """An answer was given to a question: count it, and let the question wait for an answer of its own."""
        with self._database.transaction():
            self._entries.raise_fact("given")
            self._room.used(cache_hit.id)
            if not self._entries.knows(question, cache_hit.circumstances):
                id_ = self._entries.put(question, cache_hit.circumstances, vector(), None, "matched")
                self._room.used(id_)
                self._room.make()

    def still_best(self, cache_hit: CachedAnswer, epoch: int) -> None:
        """An answer was seen to rest on the best chunks of this epoch, which was read before looking."""
        self._entries.move_epoch(cache_hit.id, epoch)

    def stale(self, cache_hit: CachedAnswer) -> None:
        """Better chunks have come for a question: its answer is forgotten, and it waits for another."""
        self._entries.drop_answers([cache_hit.id], "stale")

    def documents_changed(self, gone: Iterable[str] = ()) -> int:
        """The list of documents changes in this transaction; `gone` are versions that leave it.

        Returns how many answers rested on them and are forgotten with the commit; their questions wait.
        """
        return self._freshness.documents_changed(gone)

    def unseen(self) -> Iterator[CachedAnswer]:
        """Answers that were not looked at since the list of documents last changed, the most used first."""
        return self._entries.answered_before(self.epoch)

    def waiting(self, most: int = 100, whys: Iterable[Why] | None = None) -> list[PendingQuestion]:
        """Questions without a usable answer, for these reasons or any, the longest waiting first."""
        return self._entries.waiting(most, whys)

    def totals(self) -> AnswerCacheTotals:
        """Numbers for people."""
        questions, answered, waiting, size = self._entries.count()
        given = int(self._entries.fact("given"))
        return AnswerCacheTotals(questions, answered, waiting, given, size, self.limit_bytes)

    def clear(self) -> None:
        """Forget every question."""
        self._entries.clear()
