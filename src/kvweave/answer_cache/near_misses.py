"""Near misses: questions that may have asked what a stored one asks, and what their own answers said about it.

A near miss is remembered until its question has an answer of its own. The verdict is whether that agrees with the stored answer.
Verdicts give the lowest similarity at which wrong answers stay within the user's bound (vCache's bound, here for each kind of near
miss; verification after the fact as in Krites).
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.answer_cache.matching import READING
from kvweave.answer_cache.records import CachedAnswer
from kvweave.database import Database

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS near_misses (
        question INTEGER NOT NULL REFERENCES banked_questions (id) ON DELETE CASCADE, circumstances TEXT NOT NULL,
        asked TEXT NOT NULL, kind TEXT NOT NULL, score REAL NOT NULL, made_at REAL NOT NULL,
        PRIMARY KEY (circumstances, asked, question))""",
    "CREATE INDEX IF NOT EXISTS near_misses_by_question ON near_misses (question)",
    """CREATE TABLE IF NOT EXISTS near_verdicts (
        id INTEGER PRIMARY KEY, question INTEGER NOT NULL, asked TEXT NOT NULL, kind TEXT NOT NULL, score REAL NOT NULL,
        agreed INTEGER NOT NULL, UNIQUE (question, asked))""",
    "CREATE INDEX IF NOT EXISTS near_verdicts_by_kind ON near_verdicts (kind, score)",
)
"""`made_at` is when the stored answer was made: another one that took its place since is not judged by. In `near_verdicts`,
`asked` is a digest of the question: verdicts stay when questions are deleted."""

_MOST_REMEMBERED: Final = 1000
_MOST_VERDICTS: Final = 5000
_DOUBT: Final = 0.05
"""The chance that the bound is broken although the verdicts say that it holds."""

_LOWER: Final = ((0.0, 0.5), (0.1, 0.1), (0.25, 0.15), (0.5, 0.25))
"""The shares of refutations that are held against the bound, as parts of it, each with its weight."""

_REGIONS: Final = ((-1.0, 0.5), (0.7, 0.2), (0.8, 0.2), (0.9, 0.1))
"""The similarities from which on the bound is tested, each with its part of _DOUBT."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A stored answer whose question may be the one that was asked; `score` is how near they are, 0..1."""

    answer: CachedAnswer
    kind: str
    score: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the own answer to a question agreed with the stored one that it was near to."""

    score: float
    agreed: bool


class NearMisses:
    """The tables `near_misses` and `near_verdicts` of `database`, created if missing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(SCHEMA)

    def remember(self, asked: str, answer_settings: str, miss: NearMiss) -> None:
        """Store a near miss of a question that has no answer of its own yet; the oldest near misses are forgotten.

        One whose stored question is gone meanwhile is not stored.
        """
        values = (miss.answer.id, answer_settings, asked, miss.kind, miss.score, miss.answer.made_at_s)
        exists = "EXISTS (SELECT 1 FROM banked_questions WHERE id = ?)"
        with self._database.transaction():
            self._database.execute(
                f"INSERT OR REPLACE INTO near_misses SELECT ?, ?, ?, ?, ?, ? WHERE {exists}",
                (*values, miss.answer.id),
            )
            self._database.execute(
                """DELETE FROM near_misses WHERE rowid < (
                     SELECT rowid FROM near_misses ORDER BY rowid DESC LIMIT 1 OFFSET ?)""",
                (_MOST_REMEMBERED - 1,),
            )

    def take(self, answer_settings: str, asked: str) -> list[tuple[int, str, float, float]]:
        """Return a question's near misses and forget them: the row of the answer, kind, score, when that answer was made."""
        where = "FROM near_misses WHERE circumstances = ? AND asked = ?"
        with self._database.transaction():
            rows = self._database.query(
                f"SELECT question, kind, score, made_at {where}", (answer_settings, asked)
            )
            if rows:
                self._database.execute(f"DELETE {where}", (answer_settings, asked))
        return [(int(id_), kind, float(score), float(made_at)) for id_, kind, score, made_at in rows]

    def judge(self, id_: int, asked: str, kind: str, score: float, agreed: bool) -> None:
        """Store a verdict about the answer in a row, in place of an earlier one from the same question.

        The oldest verdicts are dropped.
        """
        digest = hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
        with self._database.transaction():
            self._database.execute(
                "INSERT OR REPLACE INTO near_verdicts (question, asked, kind, score, agreed) VALUES (?, ?, ?, ?, ?)",
                (id_, digest, kind, score, agreed),
            )
            self._database.execute(
                "DELETE FROM near_verdicts WHERE id <= (SELECT max(id) FROM near_verdicts) - ?",
                (_MOST_VERDICTS,),
            )

    def verdicts(self, kind: str) -> list[Verdict]:
        """Return the verdicts about near misses of a kind."""
        rows = self._database.query("SELECT score, agreed FROM near_verdicts WHERE kind = ?", (kind,))
        return [Verdict(float(score), bool(agreed)) for score, agreed in rows]

    def may_serve(self, miss: NearMiss, bound: float) -> bool:
        """Return whether an answer may be given: at most the share `bound` of its kind's answers is wrong, as the verdicts say.

        Never for an answer that was wrong for a question at least as near. Questions that are read alike need no verdicts.
        """
        if not 0 < bound < 1:
            return False
        rows = self._database.query(
            "SELECT max(score) FROM near_verdicts WHERE question = ? AND NOT agreed", (miss.answer.id,)
        )
        if rows[0][0] is not None and miss.score <= rows[0][0]:
            return False
        if miss.kind == READING:
            return True
        least = least_score(self.verdicts(miss.kind), bound)
        return least is not None and miss.score >= least

    def counts(self) -> tuple[int, int, int]:
        """Return how many near misses wait for a verdict, were confirmed, and were refuted."""
        rows = self._database.query(
            "SELECT (SELECT count(*) FROM near_misses), coalesce(sum(agreed), 0), count(*) FROM near_verdicts"
        )
        waiting, confirmed, judged = (int(value) for value in rows[0])
        return waiting, confirmed, judged - confirmed


def least_score(verdicts: Sequence[Verdict], bound: float) -> float | None:
    """Return the least score from which on at most the share `bound` of verdicts is a refutation, with 95 % confidence.

    The lowest of _REGIONS that passes its test; None if none does. The confidence is that of all tests of a kind of near misses
    together, also where they are repeated after every verdict (see `_evidence`): with no refutation at all it takes 81
    verdicts for a bound of 0.05, 204 for 0.02.
    """
    for least, part in _REGIONS:
        above = [verdict for verdict in verdicts if verdict.score >= least]
        refuted = sum(not verdict.agreed for verdict in above)
        if _evidence(refuted, len(above), bound) * part * _DOUBT >= 1:
            return min(verdict.score for verdict in above)  # nothing is known of less near ones
    return None


def _evidence(refuted: int, of: int, bound: float) -> float:
    """Return the likelihood ratio of the observed refutations: an error rate below `bound` against exactly `bound`.

    A mean of likelihood ratios over some lower shares. Where the true share is `bound` or more, it is a supermartingale of mean 1
    at most, so the chance that it ever reaches 1 / x is at most x (Ville's inequality), however often it is looked at.
    """
    return math.fsum(
        weight * (lower**refuted) * ((1 - lower * bound) / (1 - bound)) ** (of - refuted)
        for lower, weight in _LOWER
    )
