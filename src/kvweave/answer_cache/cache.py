"""The answer cache of a knowledge base: questions that were asked or predicted, and their answers.

It is part of the knowledge base's own database, so the commit that changes a document also drops the answers made from
it. Never calls a model: vectors come with the questions.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from typing import Final

from kvweave.answer_cache.matching import ENGLISH, Matcher
from kvweave.answer_cache.neighbours import Neighbours
from kvweave.answer_cache.records import (
    COLUMNS,
    SCHEMA,
    AnswerCacheTotals,
    AnswerProvenance,
    CachedAnswer,
    PendingQuestion,
    PendingReason,
    Vector,
    read_answer,
    read_vector,
    written_vector,
)
from kvweave.database import Database, FactTable
from kvweave.options import AskOptions
from kvweave.results import Source
from kvweave.text import clean_text

_CANDIDATES: Final = 8
"""The number of nearest stored questions that are compared with a new one word by word."""

_LEAST_COSINE: Final = 0.4
"""Stored questions below are not compared, unless they have almost the same letters."""

JUDGED_COSINE: Final = 0.6
"""Stored questions below are not put to the judge: most pass the guard, which looks for small differences."""

_MOST_NARROWER: Final = 32
"""How many smaller values of `top_k` are looked at: answers to a small knowledge base were once stored under the number of
its chunks."""

_ROW_BYTES: Final = 512
"""Size of a row beside its texts and vector: counters, and its places in the indexes. A generous estimate."""

_EVICTED_AT_ONCE: Final = 256
_NO_PROVENANCE: Final = AnswerProvenance(frozenset(), (), 0)

# Names in the table `bank_facts`
_HITS: Final = "given"
_JUDGED: Final = "judged"
_TO_JUDGE: Final = "to judge"
_REJECTED: Final = "rejected"
_PROMOTED: Final = "promoted"
_PROMOTED_GIVEN: Final = "promoted given"
_EPOCH: Final = "epoch"
_AGE: Final = "age"
_MATCHER_VERSION: Final = "readings"


class AnswerCache:
    """Questions and answers in `database`; several processes and threads may use one at once.

    Args:
        database: of the knowledge base; the tables are created if missing.
        limit_bytes: cap on the size of the cache; 0 turns it off.
        matcher: decides which questions may share an answer.
    """

    def __init__(self, database: Database, limit_bytes: int, matcher: Matcher = ENGLISH) -> None:
        self.matcher = matcher
        self.limit_bytes = limit_bytes
        self._database = database
        self._neighbours = Neighbours(database)
        self._numbers = FactTable(database, "bank_facts")
        database.script(SCHEMA)
        if self._number(_MATCHER_VERSION) != matcher.version:
            self._recompute_keys()

    @property
    def epoch(self) -> int:
        """Number of changes to the document list; read it before retrieving what an answer is made from."""
        return int(self._number(_EPOCH))

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
        text, key = clean_text(question), options.cache_key()
        rows = self._database.query(
            f"""SELECT {COLUMNS} FROM banked_questions
                WHERE circumstances = ? AND reading = ? AND answer IS NOT NULL ORDER BY question <> ?, id""",
            (key, self.matcher.key(text), text),
        )
        candidates = [read_answer(row) for row in rows]
        if candidates and candidates[0].question == text:
            return candidates[0]
        rejected = self._stored_for(text, rejected=True)
        candidates = [candidate for candidate in candidates if candidate.stored_for not in rejected]
        alike = [(candidate, float(vector() @ candidate.vector)) for candidate in candidates]
        alike.sort(key=lambda each: -each[1])
        found = self._first_same(question, alike, threshold)
        if found is None and self._has_answers(key):
            near = self._neighbours.nearest(text, vector(), key, _CANDIDATES, _LEAST_COSINE)
            answers = ((self._answer(id_), cosine) for id_, cosine in near)
            alike = [
                (one, cosine) for one, cosine in answers if one is not None and one.stored_for not in rejected
            ]
            found = self._first_same(question, alike, threshold)
        return found

    def near(self, question: str, vector: Callable[[], Vector], options: AskOptions) -> CachedAnswer | None:
        """Return the answer to the nearest question that no rule of the guard tells apart from this one, or None.

        The questions may still ask different things: the caller has them judged. Arguments as for `find`.
        """
        text, key = clean_text(question), options.cache_key()
        if not self.limit_bytes or not self._has_answers(key):
            return None
        rejected = self._stored_for(text, rejected=True)
        for id_, cosine in self._neighbours.nearest(text, vector(), key, _CANDIDATES, JUDGED_COSINE):
            found = self._answer(id_)
            if found is None or found.stored_for in rejected:
                continue
            if self.matcher.compare(question, found.question, cosine, JUDGED_COSINE).sameness == "near":
                return replace(found, similarity=cosine)
        return None

    @property
    def has_met_near(self) -> bool:
        """Whether a question could have been put to the judge; before that, nobody needs to know how well it judges."""
        return self._number(_TO_JUDGE) > 0

    def record_near(self) -> None:
        """Count a question that may be put to the judge."""
        self._numbers.add(_TO_JUDGE)

    def _stored_for(self, text: str, *, rejected: bool) -> list[str]:
        """Return the stored questions whose answer a cleaned question got, either those that a user said no to or the others."""
        rows = self._database.query(
            "SELECT stored FROM shared_answers WHERE asked = ? AND rejected = ?", (text, rejected)
        )
        return [stored for (stored,) in rows]

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
        """Return the answer to the question with the highest cosine to a vector (dimensions,), or None below `threshold`.

        It may be another question.
        """
        near = self._neighbours.nearest("", vector, options.cache_key(), 1, threshold)
        if not near or near[0][1] < threshold:  # a question of few letters is listed whatever its cosine
            return None
        answer = self._answer(near[0][0])
        return None if answer is None else replace(answer, similarity=near[0][1])

    def similar(self, vector: Vector, options: AskOptions, threshold: float) -> list[tuple[str, float]]:
        """Return questions, answered or not, with their cosine to a vector (dimensions,) if at least `threshold`.

        Compares with every question, which is slow: meant for background work.
        """
        rows = self._database.query(
            "SELECT question, vector FROM banked_questions WHERE circumstances = ?", (options.cache_key(),)
        )
        cosines = ((question, float(vector @ read_vector(blob))) for question, blob in rows)
        return [(question, cosine) for question, cosine in cosines if cosine >= threshold]

    def narrower(self, options: AskOptions) -> list[AskOptions]:
        """Return the options that have answers and differ only in a smaller `top_k`, the greatest `top_k` first.

        Such an answer is usable if the further chunks do not bear on the question.
        """
        least = max(1, options.top_k - _MOST_NARROWER)
        keys = [replace(options, top_k=top_k).cache_key() for top_k in range(least, options.top_k)]
        rows = self._database.query(
            """SELECT value FROM json_each(?) WHERE EXISTS
                 (SELECT 1 FROM banked_questions WHERE circumstances = value AND answer IS NOT NULL)""",
            (json.dumps(keys),),
        )
        return sorted((AskOptions.from_key(key) for (key,) in rows), key=lambda each: -each.top_k)

    def move(self, answer: CachedAnswer, options: AskOptions) -> CachedAnswer:
        """Store an answer under other options instead of its own, and return it.

        It replaces a question in the same words that has no answer there.
        """
        moved_to = options.cache_key()
        with self._database.transaction():
            self._database.execute(
                """DELETE FROM banked_questions WHERE circumstances = ? AND answer IS NULL
                     AND question = (SELECT question FROM banked_questions WHERE id = ?)""",
                (moved_to, answer.id),
            )
            self._database.execute(
                "UPDATE OR IGNORE banked_questions SET circumstances = ? WHERE id = ?", (moved_to, answer.id)
            )
        return replace(answer, options=options)

    def record_hit(self, answer: CachedAnswer, question: str, vector: Callable[[], Vector]) -> None:
        """Count a use of an answer; a question in other words becomes pending, to get an answer of its own."""
        text = clean_text(question)
        with self._database.transaction():
            self._numbers.add(_HITS)
            self._numbers.add(_JUDGED, answer.judged is not None)
            self._numbers.add(_PROMOTED_GIVEN, bool(answer.promoted_from) and text == answer.question)
            self._record_use(answer.id)
            if text != answer.stored_for:
                self._share(text, answer.stored_for, answer.judged)
            if self._id_of(question, answer.options) is None:
                self._record_use(self._put(question, answer.options, vector(), "matched"))
                self._evict()

    def promote(
        self,
        question: str,
        vector: Vector,
        answer: CachedAnswer,
        provenance: AnswerProvenance,
        ahead_s: float,
    ) -> bool:
        """Store another question's answer as this one's, on the judge's word `answer.judged`; return False if it is not stored.

        `provenance` names what either question's chunks are of, `ahead_s` is how long computing the answer took. The answer goes
        when a document of the two changes. Call it in the transaction that has checked that `answer` is valid.
        """
        text, options = clean_text(question), answer.options
        with self._database.transaction():
            stored = self.put(
                text, vector, options, answer.text, answer.sources, provenance, asked=False, ahead_s=ahead_s
            )
            id_ = self._id_of(text, options)
            if not stored or id_ is None:  # there was no room for it
                return False
            self._database.execute(
                "INSERT INTO promoted_answers VALUES (?, ?, ?)", (id_, answer.stored_for, answer.judged)
            )
            self._share(text, answer.stored_for, answer.judged)
            self._numbers.add(_PROMOTED)
        return True

    def judged_score(self, question: str, stored_for: str) -> float | None:
        """Return the judge's score of two questions that share an answer on its word, or None."""
        rows = self._database.query(
            "SELECT score FROM shared_answers WHERE asked = ? AND stored = ?",
            (clean_text(question), stored_for),
        )
        return rows[0][0] if rows else None

    def _share(self, text: str, stored: str, score: float | None) -> None:
        """Record that a cleaned question gets the answer of another one."""
        self._database.execute(
            """INSERT INTO shared_answers (asked, stored, score) VALUES (?, ?, ?)
               ON CONFLICT (asked, stored) DO UPDATE SET score = excluded.score""",
            (text, stored, score),
        )

    def reject(self, question: str) -> list[str]:
        """Record that a user said no to the answer of another question; return the questions whose answer this one got.

        It never gets their answers again, and loses one that was promoted.
        """
        text = clean_text(question)
        with self._database.transaction():
            stored = self._stored_for(text, rejected=False)
            self._database.execute("UPDATE shared_answers SET rejected = 1 WHERE asked = ?", (text,))
            promoted = self._database.query(
                "SELECT id FROM banked_questions WHERE question = ? AND id IN (SELECT question FROM promoted_answers)",
                (text,),
            )
            self._drop_answers([id_ for (id_,) in promoted], "asked")
            self._numbers.add(_REJECTED, len(stored))
        return stored

    def rejected_scores(self) -> list[float]:
        """Return the judge's scores of the pairs that users said no to."""
        rows = self._database.query(
            "SELECT score FROM shared_answers WHERE rejected = 1 AND score IS NOT NULL"
        )
        return [score for (score,) in rows]

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
        with self._database.transaction():
            id_ = self._put(question, options, vector, None, text, sources, provenance)
            for table in ("answer_versions", "promoted_answers"):
                self._database.execute(f"DELETE FROM {table} WHERE question = ?", (id_,))
            self._database.execute_many(
                "INSERT INTO answer_versions VALUES (?, ?)",
                [(version, id_) for version in provenance.versions],
            )
            if asked:
                self._database.execute("DELETE FROM answers_ahead WHERE question = ?", (id_,))
                self._record_use(id_)
            else:
                self._database.execute("INSERT OR REPLACE INTO answers_ahead VALUES (?, ?)", (id_, ahead_s))
            self._evict()
        return True

    def add_predicted(self, question: str, vector: Vector, options: AskOptions) -> None:
        """Add a question that is expected to be asked, as pending; one that is in the cache is left unchanged."""
        if not self.limit_bytes:
            return
        with self._database.transaction():
            if self._id_of(question, options) is None:
                id_ = self._put(question, options, vector, "predicted")
                # Of a lower weight than any that a user asked, so that it is evicted first.
                self._database.execute(
                    "UPDATE banked_questions SET last_used = ?, weight = ? WHERE id = ?",
                    (time.time(), self._number(_AGE), id_),
                )
                self._evict()

    def add_asked(self, question: str, vector: Vector, options: AskOptions) -> None:
        """Add a question that a user asked, as pending; count a use of one that is in the cache."""
        if not self.limit_bytes or self.matcher.is_time_sensitive(question):
            return
        with self._database.transaction():
            id_ = self._id_of(question, options)
            self._record_use(self._put(question, options, vector, "asked") if id_ is None else id_)
            self._evict()

    def mark_prefilled(self, question: str, options: AskOptions) -> None:
        """Record that a predicted question's KV is computed and only its answer is missing."""
        self._database.execute(
            """UPDATE banked_questions SET waiting = 'prefilled'
               WHERE circumstances = ? AND question = ? AND waiting = 'predicted'""",
            (options.cache_key(), clean_text(question)),
        )

    def delete(self, questions: Iterable[str], options: AskOptions | None = None) -> None:
        """Delete questions with their answers, under these options or under any."""
        listed = json.dumps(list(questions))
        with self._database.transaction():
            self._database.execute(
                """DELETE FROM banked_questions WHERE question IN (SELECT value FROM json_each(?))
                     AND circumstances = coalesce(?, circumstances)""",
                (listed, options and options.cache_key()),
            )
            if options is None:
                self._database.execute(
                    "DELETE FROM shared_answers WHERE stored IN (SELECT value FROM json_each(?))", (listed,)
                )

    def clear(self) -> None:
        """Delete every question; the numbers about the cache stay."""
        with self._database.transaction():
            self._database.execute("DELETE FROM banked_questions")
            self._database.execute("DELETE FROM shared_answers")

    # Validity

    def documents_changed(self, gone: Iterable[str] = ()) -> int:
        """Record a change of the document list in this transaction; `gone` are the versions that leave it.

        Drops the answers that were made from them, makes their questions pending, and returns the number of these.
        """
        versions = (json.dumps(list(gone)),)
        are_gone = "FROM answer_versions WHERE version IN (SELECT value FROM json_each(?))"
        with self._database.transaction():
            self._numbers.add(_EPOCH)
            rows = self._database.query(f"SELECT DISTINCT question {are_gone}", versions)
            dropped = self._drop_answers([id_ for (id_,) in rows], "changed")
            self._database.execute(f"DELETE {are_gone}", versions)
        return dropped

    def unchecked(self) -> Iterator[CachedAnswer]:
        """Yield answers not checked since the document list last changed, most used first."""
        ids = self._database.query(
            "SELECT id FROM banked_questions WHERE answer IS NOT NULL AND epoch < ? ORDER BY weight DESC, id",
            (self.epoch,),
        )
        for (id_,) in ids:
            if (answer := self._answer(id_)) is not None:
                yield answer

    def confirm(self, answer: CachedAnswer, epoch: int) -> None:
        """Record that an answer is made from the best chunks of an epoch, which was read before the check."""
        self._database.execute(
            "UPDATE banked_questions SET epoch = max(epoch, ?) WHERE id = ?", (epoch, answer.id)
        )

    def invalidate(self, answer: CachedAnswer) -> None:
        """Drop an answer because better chunks came in; its question becomes pending."""
        self._drop_answers([answer.id], "stale")

    # Listing

    def stored(self, question: str, options: AskOptions) -> CachedAnswer | None:
        """Return the answer to a question in exactly these words, or None."""
        id_ = self._id_of(question, options)
        return None if id_ is None else self._answer(id_)

    def vector(self, question: str, options: AskOptions) -> Vector:
        """Return the vector of a question in the cache, (dimensions,); answered or not."""
        id_ = self._id_of(question, options)
        ((blob,),) = self._database.query("SELECT vector FROM banked_questions WHERE id = ?", (id_,))
        return read_vector(blob)

    def ahead_s(self, answer: CachedAnswer) -> float | None:
        """Return the seconds that computing an answer ahead took, or None if a user waited for it."""
        rows = self._database.query("SELECT seconds FROM answers_ahead WHERE question = ?", (answer.id,))
        return float(rows[0][0]) if rows else None

    def pending(
        self, most: int = 100, reasons: Iterable[PendingReason] | None = None
    ) -> list[PendingQuestion]:
        """Return pending questions, the longest pending first: for `reasons` or for any."""
        wanted = None if reasons is None else json.dumps(list(reasons))
        rows = self._database.query(
            """SELECT question, circumstances, waiting FROM banked_questions
               WHERE waiting IS NOT NULL AND (? IS NULL OR waiting IN (SELECT value FROM json_each(?)))
               ORDER BY waiting_since, id LIMIT ?""",
            (wanted, wanted, most),
        )
        return [PendingQuestion(question, AskOptions.from_key(key), reason) for question, key, reason in rows]

    def most_used(self) -> list[tuple[str, AskOptions]]:
        """Return the questions that have an answer, most used first."""
        rows = self._database.query(
            """SELECT question, circumstances FROM banked_questions WHERE answer IS NOT NULL
               ORDER BY weight DESC, last_used DESC, id DESC"""
        )
        return [(question, AskOptions.from_key(key)) for question, key in rows]

    def totals(self) -> AnswerCacheTotals:
        """Return counts and sizes."""
        ((questions, answered, waiting),) = self._database.query(
            "SELECT count(*), count(answer), count(waiting) FROM banked_questions"
        )
        names = (_HITS, _JUDGED, _REJECTED, _PROMOTED, _PROMOTED_GIVEN)
        given, judged, rejected, promoted, promoted_given = (int(self._number(name)) for name in names)
        return AnswerCacheTotals(
            questions=questions,
            answered=answered,
            waiting=waiting,
            given=given,
            judged=judged,
            rejected=rejected,
            promoted=promoted,
            promoted_given=promoted_given,
            bytes=self._used_bytes(),
            limit_bytes=self.limit_bytes,
        )

    # Rows

    def _put(
        self,
        question: str,
        options: AskOptions,
        vector: Vector,
        reason: PendingReason | None,
        answer: str | None = None,
        sources: Iterable[Source] = (),
        provenance: AnswerProvenance = _NO_PROVENANCE,
    ) -> int:
        """Store a question with its answer, or pending for a reason, in place of an earlier row; return its id."""
        text, key, now = clean_text(question), options.cache_key(), time.time()
        blob = written_vector(vector)
        listed = json.dumps([astuple(source) for source in sources])
        chunks = json.dumps(list(provenance.chunks))
        size = (
            _ROW_BYTES + len(blob) + sum(len(part.encode()) for part in (text, answer or "", listed, chunks))
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
                    *(key, text, self.matcher.key(text), blob, answer, listed, chunks),
                    *(provenance.epoch, now, reason, now if reason else None, now, size),
                ),
            )
            id_ = self._id_of(text, options)
        assert id_ is not None
        return id_

    def _id_of(self, question: str, options: AskOptions) -> int | None:
        """Return the id of a question in exactly these words, answered or not, or None."""
        rows = self._database.query(
            "SELECT id FROM banked_questions WHERE circumstances = ? AND question = ?",
            (options.cache_key(), clean_text(question)),
        )
        return int(rows[0][0]) if rows else None

    def _answer(self, id_: int) -> CachedAnswer | None:
        rows = self._database.query(
            f"SELECT {COLUMNS} FROM banked_questions WHERE id = ? AND answer IS NOT NULL", (id_,)
        )
        return read_answer(rows[0]) if rows else None

    def _has_answers(self, key: str) -> bool:
        answered = "SELECT 1 FROM banked_questions WHERE circumstances = ? AND answer IS NOT NULL LIMIT 1"
        return bool(self._database.query(answered, (key,)))

    def _drop_answers(self, ids: Iterable[int], reason: PendingReason) -> int:
        """Delete the answers of some questions, which become pending; return the number of deleted answers."""
        return self._database.execute(
            """UPDATE banked_questions SET answer = NULL, sources = '[]', chunks = '[]',
                 bytes = bytes - length(CAST(answer AS BLOB)) - length(sources) - length(chunks) + 4,
                 waiting = ?, waiting_since = ?
               WHERE answer IS NOT NULL AND id IN (SELECT value FROM json_each(?))""",
            (reason, time.time(), json.dumps(list(ids))),
        )

    def _recompute_keys(self) -> None:
        """Replace the keys that another version of the matcher computed."""
        with self._database.transaction():
            rows = self._database.query("SELECT id, question FROM banked_questions")
            self._database.execute_many(
                "UPDATE banked_questions SET reading = ? WHERE id = ?",
                [(self.matcher.key(text), id_) for id_, text in rows],
            )
            self._numbers.record(_MATCHER_VERSION, self.matcher.version)

    def _number(self, name: str) -> float:
        return self._numbers.get(name) or 0.0

    # Eviction: by weights, which are uses plus an age that grows

    def _record_use(self, id_: int) -> None:
        """Count one use of a question; being asked first is one."""
        self._database.execute(
            "UPDATE banked_questions SET uses = uses + 1, last_used = ?, weight = uses + 1 + ? WHERE id = ?",
            (time.time(), self._number(_AGE), id_),
        )

    def _used_bytes(self) -> int:
        ((used,),) = self._database.query("SELECT coalesce(sum(bytes), 0) FROM banked_questions")
        return int(used)

    def _evict(self) -> None:
        """Delete the questions of the lowest weight until the rest is within the cap."""
        with self._database.transaction():
            while (excess := self._used_bytes() - self.limit_bytes) > 0:
                rows = self._database.query(
                    "SELECT id, weight, bytes FROM banked_questions ORDER BY weight, last_used, id LIMIT ?",
                    (_EVICTED_AT_ONCE,),
                )
                victims: list[int] = []
                heaviest = 0.0
                for id_, weight, size in rows:
                    victims.append(id_)
                    heaviest = weight
                    excess -= size
                    if excess <= 0:
                        break
                self._database.execute(
                    "DELETE FROM banked_questions WHERE id IN (SELECT value FROM json_each(?))",
                    (json.dumps(victims),),
                )
                self._numbers.add(_AGE, max(0.0, heaviest - self._number(_AGE)))
                self._database.execute(
                    """DELETE FROM shared_answers WHERE NOT rejected AND (
                         asked NOT IN (SELECT question FROM banked_questions)
                         OR stored NOT IN (SELECT question FROM banked_questions)
                            AND (asked, stored) NOT IN (SELECT banked_questions.question, stored FROM promoted_answers
                                                        JOIN banked_questions ON id = promoted_answers.question))"""
                )
