"""Cost and benefit of background work by day, in the database of the knowledge base."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvweave.database import Database

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS idle_work (
        day TEXT NOT NULL, kind TEXT NOT NULL, jobs INTEGER NOT NULL, seconds REAL NOT NULL, flops REAL NOT NULL,
        PRIMARY KEY (day, kind)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS idle_worth (
        day TEXT PRIMARY KEY, entries INTEGER NOT NULL, hits INTEGER NOT NULL, saved_s REAL NOT NULL,
        kv_bytes REAL NOT NULL) WITHOUT ROWID""",
)

_ANSWERING: Final = frozenset(
    {"answers", "population", "conversion"}
)  # the kinds of jobs that answer a question


@dataclass(frozen=True, slots=True)
class Spent:
    """What jobs cost: their number, seconds without waiting for requests, floating-point operations."""

    jobs: int
    seconds: float
    flops: float


@dataclass(frozen=True, slots=True)
class Worth:
    """Results of background work and their use.

    Attributes:
        entries: answers computed ahead.
        hits: answers given to users that were computed ahead.
        saved_s: seconds that computing those answers took, which their users did not wait.
        kv_bytes: bytes of chunk KV by which the store grew.
    """

    entries: int = 0
    hits: int = 0
    saved_s: float = 0.0
    kv_bytes: float = 0.0


class BackgroundBudget:
    """The tables `idle_work` and `idle_worth` of `database`, created if they are not there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(_SCHEMA)

    def add(self, kind: str, spent: Spent) -> None:
        """Add work of a kind to today's."""
        self._database.execute(
            """INSERT INTO idle_work VALUES (?, ?, ?, ?, ?) ON CONFLICT (day, kind) DO UPDATE SET
                 jobs = jobs + excluded.jobs, seconds = seconds + excluded.seconds, flops = flops + excluded.flops""",
            (_today(), kind, spent.jobs, spent.seconds, spent.flops),
        )

    def today(self) -> Spent:
        """Return all of today's work, by the local calendar."""
        return sum_of(self.totals(today=True).values())

    def totals(self, *, today: bool = False) -> dict[str, Spent]:
        """Return the work so far, or today's, by kind."""
        rows = self._database.query(
            """SELECT kind, sum(jobs), sum(seconds), sum(flops) FROM idle_work
               WHERE day = coalesce(?, day) GROUP BY kind ORDER BY kind""",
            (_today() if today else None,),
        )
        return {kind: Spent(*spent) for kind, *spent in rows}

    def answer_seconds(self) -> float:
        """Return the mean seconds of answering a question ahead; 0 before the first."""
        done = sum_of(spent for kind, spent in self.totals().items() if kind in _ANSWERING)
        return done.seconds / done.jobs if done.jobs else 0.0

    def add_worth(self, worth: Worth) -> None:
        """Add what was made, or was of use, to today's."""
        self._database.execute(
            """INSERT INTO idle_worth VALUES (?, ?, ?, ?, ?) ON CONFLICT (day) DO UPDATE SET
                 entries = entries + excluded.entries, hits = hits + excluded.hits,
                 saved_s = saved_s + excluded.saved_s, kv_bytes = kv_bytes + excluded.kv_bytes""",
            (_today(), worth.entries, worth.hits, worth.saved_s, worth.kv_bytes),
        )

    def worth(self, *, today: bool = False) -> Worth:
        """Return the counts of results that were made and used so far, or today."""
        rows = self._database.query(
            """SELECT coalesce(sum(entries), 0), coalesce(sum(hits), 0), coalesce(sum(saved_s), 0),
                 coalesce(sum(kv_bytes), 0) FROM idle_worth WHERE day = coalesce(?, day)""",
            (_today() if today else None,),
        )
        return Worth(*rows[0])


def sum_of(parts: Iterable[Spent]) -> Spent:
    """Return what several kinds of work cost together."""
    every = list(parts)
    return Spent(
        sum(each.jobs for each in every),
        sum(each.seconds for each in every),
        sum(each.flops for each in every),
    )


def _today() -> str:
    return time.strftime("%Y-%m-%d")
