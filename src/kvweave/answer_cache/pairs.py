"""Finds stored answers that may be given to each other's questions. For background work: it compares many."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from kvweave.answer_cache.entries import Entries
from kvweave.answer_cache.matching import Matcher
from kvweave.answer_cache.records import CachedAnswer
from kvweave.database import Database

CANDIDATES: Final = 8
"""How many of the nearest questions are compared with one word by word."""

LEAST_COSINE: Final = 0.4
"""Questions below are not compared, unless they have almost the same letters."""

_MOST_PAIRS: Final = 1000
"""How many pairs of answers are compared at a time."""

_MOST_NEW: Final = 200
"""How many new answers are compared with others at a time: that takes a second or two."""


class AnswerPairs:
    """Pairs of the answers in `entries`, which are in the table `banked_questions` of `database`."""

    def __init__(self, database: Database, entries: Entries, matcher: Matcher) -> None:
        self._database = database
        self._entries = entries
        self._matcher = matcher

    def of_one_key(self) -> Iterator[tuple[CachedAnswer, CachedAnswer]]:
        """Yield answers to two questions under the same settings and key that differ, the more used one first."""
        rows = self._database.query(
            """SELECT one.id, other.id FROM banked_questions one JOIN banked_questions other
                 ON one.circumstances = other.circumstances AND one.reading = other.reading
               WHERE one.answer <> other.answer AND (one.weight, -one.id) > (other.weight, -other.id)
               ORDER BY one.id, other.id LIMIT ?""",
            (_MOST_PAIRS,),
        )
        for ids in rows:
            one, other = map(self._entries.get, ids)
            if one is not None and other is not None:
                yield one, other

    def new_answers(self, made_after_s: float) -> Iterator[CachedAnswer]:
        """Yield the answers that were made after a time in seconds since 1970, the oldest first; a part of them if many."""
        rows = self._database.query(
            "SELECT id FROM banked_questions WHERE answer IS NOT NULL AND made_at > ? ORDER BY made_at, id LIMIT ?",
            (made_after_s, _MOST_NEW),
        )
        for (id_,) in rows:
            answer = self._entries.get(id_)
            if answer is not None:
                yield answer

    def same(self, answer: CachedAnswer, threshold: float) -> list[CachedAnswer]:
        """Return the answers to other questions that ask the same, under the same settings.

        `threshold` and what the answers' `errors` mean are as in `AnswerCache.find`.
        """
        alike = self._entries.neighbours(
            answer.question, answer.vector, answer.options, CANDIDATES, LEAST_COSINE
        )
        same = []
        for other, cosine in alike:
            compared = self._matcher.compare(answer.question, other.question, cosine, threshold)
            if other.id != answer.id and compared.sameness == "same":
                same.append(replace(other, similarity=cosine, errors=compared.errors))
        return same
