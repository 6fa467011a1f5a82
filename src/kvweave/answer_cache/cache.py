"""The answer cache of a knowledge base: questions that were asked or predicted, and their answers.

It is part of the knowledge base's own database, so the commit that changes a document also drops the answers made from
it. Never calls a model: vectors come with the questions.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from kvweave.answer_cache.entries import Entries, NewAnswer
from kvweave.answer_cache.matching import ENGLISH, Matcher, similarity
from kvweave.answer_cache.records import (
    AnswerCacheTotals,
    AnswerProvenance,
    CachedAnswer,
    PendingQuestion,
    PendingReason,
    Vector,
)
from kvweave.database import Database
from kvweave.options import AskOptions
from kvweave.results import Source
from kvweave.text import clean_text

_CANDIDATES: Final = 8
"""The number of nearest stored questions that are compared with a new one word by word."""

_LEAST_COSINE: Final = 0.4
"""Stored questions below are not compared, unless they have almost the same letters."""

_RECENT_QUESTIONS: Final = 2048
"""The number of questions that `AnswerCache.nearest` compares: that takes a few milliseconds."""

# Numbers in the table `bank_facts`
_HITS: Final = "given"
_EPOCH: Final = "epoch"
_AGE: Final = "age"


class AnswerCache:
    """Questions and answers in `database`; several processes and threads may use one at once.

    Args:
        database: of the knowledge base.
        limit_bytes: cap on the size of the cache; 0 turns it off.
        matcher: decides which questions may share an answer.
    """

    def __init__(self, database: Database, limit_bytes: int, matcher: Matcher = ENGLISH) -> None:
        self.matcher = matcher
        self._database = database
        self._entries = Entries(database, matcher)
        self._invalidation = Invalidation(database, self._entries)
        self._eviction = Eviction(database, self._entries, limit_bytes)

    @property
    def limit_bytes(self) -> int:
        """The cap."""
        return self._eviction.limit_bytes

    @property
    def epoch(self) -> int:
        """Number of changes to the document list; read it before retrieving what an answer is made from."""
        return self._invalidation.epoch

    def transaction(self) -> AbstractContextManager[None]:
        """Commit everything inside together, as `Database.transaction` does."""
        return self._database.transaction()

    # Looking up

    def find(
        self, question: str, vector: Callable[[], Vector], options: AskOptions, threshold: float
    ) -> CachedAnswer | None:
        """Return the stored answer to the same question, the most similar one first, or None.

        The caller checks whether an answer of an earlier epoch is still made from the best chunks.

        Args:
            question: as asked.
            vector: returns its vector (dimensions,) of length 1; called only if needed.
            options: of the request.
            threshold: τ, the least cosine of near questions, 0..1; see `Matcher.compare`.
        """
        if not self.limit_bytes or self.matcher.is_time_sensitive(question):
            return None
        candidates = self._entries.candidates(question, options)
        if candidates and candidates[0].question == clean_text(question):
            return candidates[0]
        alike = [(candidate, similarity(vector(), candidate.vector)) for candidate in candidates]
        alike.sort(key=lambda each: -each[1])
        found = self._first_same(question, alike, threshold)
        if found is None and self._entries.has_answers(options):
            alike = self._entries.neighbours(question, vector(), options, _CANDIDATES, _LEAST_COSINE)
            found = self._first_same(question, alike, threshold)
        return found

    def _first_same(
        self, question: str, alike: list[tuple[CachedAnswer, float]], threshold: float
    ) -> CachedAnswer | None:
        """Return the first answer whose question asks the same, or None. `alike` pairs answers with cosines."""
        for candidate, cosine in alike:
            compared = self.matcher.compare(question, candidate.question, cosine, threshold)
            if compared.sameness == "same":
                return replace(candidate, similarity=cosine, errors=compared.errors)
        return None

    def nearest(self, vector: Vector, options: AskOptions, threshold: float) -> CachedAnswer | None:
        """Return the answer to the recently used question with the highest cosine to a vector (dimensions,), or None below `threshold`.

        It may be another question.
        """
        ids, vectors = self._entries.recently_used(options, _RECENT_QUESTIONS)
        if not ids:
            return None
        cosines = vectors @ vector
        best = int(cosines.argmax())
        if cosines[best] < threshold:
            return None
        answer = self._entries.get(ids[best])
        return None if answer is None else replace(answer, similarity=float(cosines[best]))

    def similar(self, vector: Vector, options: AskOptions, threshold: float) -> list[tuple[str, float]]:
        """Return questions, answered or not, with their cosine to a vector (dimensions,) if at least `threshold`.

        Compares with every question, which is slow: meant for background work.
        """
        cosines = (
            (question, similarity(vector, other)) for question, other in self._entries.vectors(options)
        )
        return [(question, cosine) for question, cosine in cosines if cosine >= threshold]

    def narrower(self, options: AskOptions) -> list[AskOptions]:
        """Return the options that have answers and differ only in a smaller `top_k`, the greatest `top_k` first.

        Such an answer is usable if the further chunks do not bear on the question.
        """
        return self._entries.narrower(options)

    def move(self, answer: CachedAnswer, options: AskOptions) -> CachedAnswer:
        """Store an answer under other options instead of its own, and return it."""
        self._entries.move(answer.id, options)
        return replace(answer, options=options)

    def record_hit(self, answer: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """Count a use of an answer; a question in other words becomes pending, to get an answer of its own."""
        with self._database.transaction():
            self._entries.increase(_HITS)
            self._eviction.record_use(answer.id)
            if not self._entries.contains(question, answer.options):
                id_ = self._entries.put(question, answer.options, vector(), None, "matched")
                self._eviction.record_use(id_)
                self._eviction.evict()

    # Storing

    def put(
        self,
        question: str,
        vector: Vector,
        options: AskOptions,
        text: str,
        sources: Iterable[Source],
        provenance: AnswerProvenance,
        asked: bool = True,
        ahead_s: float = 0.0,
    ) -> bool:
        """Store an answer in place of an earlier one to the same words; return False if it is not worth storing.

        Call it in the transaction that has checked that the documents of `provenance` still exist. An empty answer, or
        one to a time-sensitive question, is not stored. `asked` is False for an answer that was computed ahead: it does
        not count as a use of the question, and `ahead_s` is how long computing it took.
        """
        if not (text and self.limit_bytes) or self.matcher.is_time_sensitive(question):
            return False
        answer = NewAnswer(text, tuple(sources), provenance.chunks, provenance.epoch)
        with self._database.transaction():
            id_ = self._entries.put(question, options, vector, answer, None)
            self._invalidation.set_versions(id_, provenance.versions)
            self._entries.set_ahead(id_, None if asked else ahead_s)
            if asked:
                self._eviction.record_use(id_)
            self._eviction.evict()
        return True

    def add_predicted(self, question: str, vector: Vector, options: AskOptions) -> None:
        """Add a question that is expected to be asked, as pending; one that is in the cache is left unchanged."""
        if not self.limit_bytes:
            return
        with self._database.transaction():
            if not self._entries.contains(question, options):
                id_ = self._entries.put(question, options, vector, None, "predicted")
                self._eviction.record_prediction(id_)
                self._eviction.evict()

    def add_asked(self, question: str, vector: Vector, options: AskOptions) -> None:
        """Add a question that a user asked, as pending; count a use of one that is in the cache."""
        if not self.limit_bytes or self.matcher.is_time_sensitive(question):
            return
        with self._database.transaction():
            id_ = self._entries.id_of(question, options)
            if id_ is None:
                id_ = self._entries.put(question, options, vector, None, "asked")
            self._eviction.record_use(id_)
            self._eviction.evict()

    def mark_prefilled(self, question: str, options: AskOptions) -> None:
        """Record that a predicted question's KV is computed and only its answer is missing."""
        self._entries.mark_prefilled(question, options)

    def delete(self, questions: Iterable[str], options: AskOptions | None = None) -> None:
        """Delete questions with their answers, under these options or under any."""
        self._entries.delete(questions, options)

    def clear(self) -> None:
        """Delete every question."""
        self._entries.clear()

    # Validity

    def documents_changed(self, gone: Iterable[str] = ()) -> int:
        """Record a change of the document list in this transaction; `gone` are the versions that leave it.

        Drops the answers that were made from them, makes their questions pending, and returns the number of these.
        """
        return self._invalidation.documents_changed(gone)

    def unchecked(self) -> Iterator[CachedAnswer]:
        """Yield answers not checked since the document list last changed, most used first."""
        return self._entries.answered_before(self.epoch)

    def get(self, id_: int) -> CachedAnswer | None:
        """Return the answer in a row, or None if it was dropped."""
        return self._entries.get(id_)

    def stored(self, question: str, options: AskOptions) -> CachedAnswer | None:
        """Return the answer to a question in exactly these words, or None."""
        id_ = self._entries.id_of(question, options)
        return None if id_ is None else self._entries.get(id_)

    def ahead_s(self, answer: CachedAnswer) -> float | None:
        """Return the seconds that computing an answer ahead took, or None if a user waited for it."""
        return self._entries.ahead_s(answer.id)

    def confirm(self, answer: CachedAnswer, epoch: int) -> None:
        """Record that an answer is made from the best chunks of an epoch, which was read before the check."""
        self._entries.raise_epoch(answer.id, epoch)

    def invalidate(self, answer: CachedAnswer) -> None:
        """Drop an answer because better chunks came in; its question becomes pending."""
        self._entries.drop_answers([answer.id], "stale")

    # Listing

    def pending(
        self, most: int = 100, reasons: Iterable[PendingReason] | None = None, without: Iterable[str] = ()
    ) -> list[PendingQuestion]:
        """Return pending questions, the longest pending first: for `reasons` or for any, leaving out those of `without`."""
        return self._entries.pending(most, reasons, without)

    def most_used(self) -> list[tuple[str, AskOptions]]:
        """Return the questions that have an answer, most used first."""
        return self._entries.most_used()

    def totals(self) -> AnswerCacheTotals:
        """Return counts and sizes."""
        counts, hits = self._entries.count(), int(self._entries.counter(_HITS))
        return AnswerCacheTotals(
            counts.questions,
            counts.answered,
            counts.waiting,
            hits,
            counts.bytes,
            self.limit_bytes,
        )


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
        """Start the next epoch and drop the answers made from versions that are gone; return their number."""
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


class Eviction:
    """Keeps the table of questions below `limit_bytes`, by the weights in it: uses plus an age that grows."""

    _PAGE_ROWS: Final = 256

    def __init__(self, database: Database, entries: Entries, limit_bytes: int) -> None:
        self._database = database
        self._entries = entries
        self.limit_bytes = limit_bytes

    def record_use(self, id_: int) -> None:
        """Count one use of a question; being asked first is one."""
        self._database.execute(
            """UPDATE banked_questions SET uses = uses + 1, last_used = ?,
                 weight = uses + 1 + coalesce((SELECT value FROM bank_facts WHERE name = ?), 0) WHERE id = ?""",
            (time.time(), _AGE, id_),
        )

    def record_prediction(self, id_: int) -> None:
        """Give a predicted question a lower weight than any that a user asked, so that it is evicted first."""
        self._database.execute(
            """UPDATE banked_questions SET last_used = ?,
                 weight = coalesce((SELECT value FROM bank_facts WHERE name = ?), 0) WHERE id = ?""",
            (time.time(), _AGE, id_),
        )

    def evict(self) -> None:
        """Delete the questions of the lowest weight until the rest is within the cap."""
        with self._database.transaction():
            while (excess := self._entries.count().bytes - self.limit_bytes) > 0:
                victims, heaviest = self._lightest(excess)
                self._database.execute(
                    "DELETE FROM banked_questions WHERE id IN (SELECT value FROM json_each(?))",
                    (json.dumps(victims),),
                )
                self._entries.increase(_AGE, max(0.0, heaviest - self._entries.counter(_AGE)))

    def _lightest(self, excess_bytes: int) -> tuple[list[int], float]:
        """Return the questions of lowest weight that free `excess_bytes`, at most one page, and the highest weight."""
        rows = self._database.query(
            "SELECT id, weight, bytes FROM banked_questions ORDER BY weight, last_used, id LIMIT ?",
            (self._PAGE_ROWS,),
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
