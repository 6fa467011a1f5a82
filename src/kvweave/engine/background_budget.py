"""What background work has cost, by day and kind, in the knowledge base's database."""

import time
from dataclasses import dataclass
from typing import Final

from kvweave.database import Database

_SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS idle_work (
        day TEXT NOT NULL, kind TEXT NOT NULL, jobs INTEGER NOT NULL, seconds REAL NOT NULL, flops REAL NOT NULL,
        PRIMARY KEY (day, kind)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS idle_facts (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID",
)


@dataclass(frozen=True, slots=True)
class Spent:
    """What jobs cost: their number, seconds without waiting for requests, floating-point operations."""

    jobs: int
    seconds: float
    flops: float


class BackgroundBudget:
    """The tables `idle_work` and `idle_facts` of `database`, created if they are not there."""

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
        rows = self._database.query(
            """SELECT coalesce(sum(jobs), 0), coalesce(sum(seconds), 0), coalesce(sum(flops), 0)
               FROM idle_work WHERE day = ?""",
            (_today(),),
        )
        return Spent(*rows[0])

    def totals(self) -> dict[str, Spent]:
        """Return all work so far, by kind."""
        rows = self._database.query(
            "SELECT kind, sum(jobs), sum(seconds), sum(flops) FROM idle_work GROUP BY kind ORDER BY kind"
        )
        return {kind: Spent(*spent) for kind, *spent in rows}

    def fact(self, name: str) -> float | None:
        """Return a recorded number, or None."""
        rows = self._database.query("SELECT value FROM idle_facts WHERE name = ?", (name,))
        return float(rows[0][0]) if rows else None

    def record_fact(self, name: str, value: float) -> None:
        """Record a number."""
        self._database.execute("INSERT OR REPLACE INTO idle_facts VALUES (?, ?)", (name, value))


def _today() -> str:
    return time.strftime("%Y-%m-%d")
