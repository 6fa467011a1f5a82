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

from kvweave.answer_cache.english.normalize import clean_text
from kvweave.answer_cache.entries import Entries, NewAnswer
from kvweave.answer_cache.matching import CAPITALS, ENGLISH, Matcher, similarity
from kvweave.answer_cache.near_misses import NearMiss, NearMisses
from kvweave.answer_cache.pairs import CANDIDATES, LEAST_COSINE, AnswerPairs
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

_RECENT_QUESTIONS: Final = 2048
"""How many questions `AnswerCache.nearest` compares: that takes a few milliseconds."""

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
        self._near = NearMisses(database)
        self.pairs = AnswerPairs(database, self._entries, matcher)
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
        """Return the answer to the most similar question that is the same, or None.

        The caller checks whether an answer of an earlier epoch is still made from the best chunks.

        Args:
            question: as asked.
            vector: returns its vector (dimensions,) of length 1; called only if needed.
            options: of the request.
            threshold: τ, 0..1; not applied to a question in the very same words.
        """
        return self.look_up(question, vector, options, threshold)[0]

    def look_up(
        self, question: str, vector: Callable[[], Vector], options: AskOptions, threshold: float
    ) -> tuple[CachedAnswer | None, list[NearMiss]]:
        """Return what `find` returns; where that is None, also the answers to questions that may be the same, nearest first."""
        if not self.limit_bytes or self.matcher.is_time_sensitive(question):
            return None, []
        candidates = self._entries.candidates(question, options)
        if candidates and candidates[0].question == clean_text(question):
            return candidates[0], []
        alike = [(candidate, similarity(vector(), candidate.vector)) for candidate in candidates]
        alike.sort(key=lambda each: -each[1])
        found, near = self._compared(question, alike, threshold)
        if found is None and self._entries.has_answers(options):
            alike = self._entries.neighbours(question, vector(), options, CANDIDATES, LEAST_COSINE)
            found, near = self._compared(question, alike, threshold)
        return found, near

    def _compared(
        self, question: str, alike: list[tuple[CachedAnswer, float]], threshold: float
    ) -> tuple[CachedAnswer | None, list[NearMiss]]:
        """Return the first of some answers with their cosines whose question is the same, and those that are near."""
        near = []
        for candidate, cosine in alike:
            compared = self.matcher.compare(question, candidate.question, cosine, threshold)
            found = replace(candidate, similarity=cosine, errors=compared.errors)
            if compared.sameness == "same":
                return found, []
            if compared.sameness == "near":
                near.append(NearMiss(found, compared.kind, cosine))
        return None, [miss for miss in near if not any(self._differ(miss, other) for other in near)]

    def _differ(self, one: NearMiss, other: NearMiss) -> bool:
        """Return whether two near questions differ in capitals that the asked one lacks: "mW" and "MW". Then neither is nearer."""
        questions = one.answer.question, other.answer.question
        return (
            questions[0].lower() == questions[1].lower()
            and self.matcher.compare(*questions, 1.0, 0.0).kind == CAPITALS
        )

    def remember(self, question: str, options: AskOptions, miss: NearMiss) -> None:
        """Remember a near miss of a question until `judge` is called for it."""
        self._near.remember(clean_text(question), options.cache_key(), miss)

    def judge(self, question: str, options: AskOptions, agrees: Callable[[str], bool]) -> None:
        """Record about each near miss of a question whether the stored answer agrees with the question's own.

        Call it in the transaction that stores the own answer. `agrees` tells it from the text of the stored one.
        """
        key = (options.cache_key(), clean_text(question))
        if not self._database.query("SELECT 1 FROM near_misses WHERE circumstances = ? AND asked = ?", key):
            return  # as for most questions
        for id_, kind, score, made_at in self._near.take(*key):
            stored = self._entries.get(id_)
            if stored is not None and stored.made_at_s == made_at:
                self._near.judge(id_, key[1], kind, score, agrees(stored.text))

    def may_serve(self, miss: NearMiss, bound: float) -> bool:
        """Return whether the verdicts allow to give a near miss's answer, with at most the share `bound` of such answers wrong."""
        return self._near.may_serve(miss, bound)

    def nearest(self, vector: Vector, options: AskOptions, threshold: float) -> CachedAnswer | None:
        """Return the answer to the question nearest to a vector (dimensions,), be it the same question or not.

        Compares with recently used questions; None if none has a cosine of at least `threshold`.
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
        """Return the options with a smaller `top_k`, alike in all else, that have answers; the greatest `top_k` first.

        Such an answer is of use where the chunks asked for beyond its own do not bear on the question.
        """
        return self._entries.narrower(options)

    def move(self, answer: CachedAnswer, options: AskOptions) -> CachedAnswer:
        """Store an answer under options that it was found to be good for too, in place of its own; return it."""
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
        """Store an answer in place of an earlier one to the same words; return whether it was worth storing.

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
        """Add a question that was answered in a conversation, as pending; one that is in the cache is used once more."""
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

        Returns how many answers were made from them: these are dropped and their questions become pending.
        """
        return self._invalidation.documents_changed(gone)

    def unchecked(self) -> Iterator[CachedAnswer]:
        """Yield answers not checked since the document list last changed, most used first."""
        return self._entries.answered_before(self.epoch)

    def get(self, id_: int) -> CachedAnswer | None:
        """Return the answer in a row; None if it has none any more."""
        return self._entries.get(id_)

    def stored(self, question: str, options: AskOptions) -> CachedAnswer | None:
        """Return the answer to a question in these very words; None if it has none."""
        id_ = self._entries.id_of(question, options)
        return None if id_ is None else self._entries.get(id_)

    def ahead_s(self, answer: CachedAnswer) -> float | None:
        """Return the seconds that computing an answer ahead took; None for one that a user waited for."""
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
        """Return questions without a usable answer, for these reasons or for any, without some; the longest pending first."""
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
            *self._near.counts(),
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
        """Start the next epoch and drop the answers made from versions that are gone; return how many."""
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
