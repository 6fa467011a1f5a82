"""Cost and use of each kind of prediction, counted since the documents last changed.

A kind that costs more than it saves is paused until the documents change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from kvweave.database import Database

PredictionOrigin: TypeAlias = Literal["knowledge", "history", "paraphrase"]
"""What a question was predicted from: the summary alone, earlier questions too, or a question that it says in other words."""

LEAST_ASKED: Final = 30
"""Questions that users ask, with predictions of a kind ready, before the kind is judged."""

LEAST_WORK: Final = 20.0
"""Work on a kind before it is judged, in answers: the time that answering so many questions ahead takes."""

WORK_PER_HIT: Final = 50.0
"""The most work, in answers, that one answer given to a user is worth."""

ORIGINS: Final[tuple[PredictionOrigin, ...]] = get_args(PredictionOrigin)


@dataclass(frozen=True, slots=True)
class OriginWorth:
    """Cost and use of one kind of prediction.

    Attributes:
        ready: its questions that were answered ahead.
        asked: questions that users asked since the first of them was.
        hits: number of those that got an answer from it.
        seconds: of work.
        answer_s: mean seconds of answering a question ahead; None before the first one.
    """

    ready: int = 0
    asked: int = 0
    hits: int = 0
    seconds: float = 0.0
    answer_s: float | None = None

    @property
    def work(self) -> float | None:
        """The work, as a number of answers that could be computed in its time; None if `answer_s` is."""
        return self.seconds / self.answer_s if self.answer_s else None

    @property
    def hits_per_work(self) -> float | None:
        """Hits divided by `work`; None if that is."""
        work = self.work
        return self.hits / work if work else None

    @property
    def paused(self) -> str:
        """The reason why this kind is paused, or an empty text."""
        work = self.work
        if work is None or work < LEAST_WORK or self.asked < LEAST_ASKED or self.hits * WORK_PER_HIT >= work:
            return ""
        return (
            f"{self.hits} of {self.asked} questions were answered from it for the work of {work:.0f} answers; it starts "
            "again when documents change"
        )


class PredictionWorth:
    """The table `prediction_worth` of `database`, created if missing."""

    _SCHEMA: Final = (
        """CREATE TABLE IF NOT EXISTS prediction_worth (
            origin TEXT PRIMARY KEY, ready INTEGER NOT NULL DEFAULT 0, asked INTEGER NOT NULL DEFAULT 0,
            hits INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0) WITHOUT ROWID""",
    )

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script(self._SCHEMA)

    def add_ready(self, origin: PredictionOrigin) -> None:
        """Count a question that was answered ahead."""
        self._add("ready", origin, 1)

    def add_hit(self, origin: PredictionOrigin) -> None:
        """Count an answer given to a user."""
        self._add("hits", origin, 1)

    def add_seconds(self, origin: PredictionOrigin, seconds: float) -> None:
        """Add work."""
        self._add("seconds", origin, seconds)

    def all(self, answer_s: float | None) -> Mapping[PredictionOrigin, OriginWorth]:
        """Return cost and use of every kind; `answer_s` is the mean seconds of answering a question ahead."""
        rows = self._database.query("SELECT origin, ready, asked, hits, seconds FROM prediction_worth")
        found = {
            origin: OriginWorth(ready, asked, hits, seconds, answer_s)
            for origin, ready, asked, hits, seconds in rows
        }
        return {origin: found.get(origin, OriginWorth(answer_s=answer_s)) for origin in ORIGINS}

    def clear(self) -> None:
        """Count from 0 again: the documents have changed."""
        self._database.execute("DELETE FROM prediction_worth")

    def _add(self, column: str, origin: PredictionOrigin, value: float) -> None:
        self._database.execute(
            f"""INSERT INTO prediction_worth (origin, {column}) VALUES (?, ?)
                ON CONFLICT (origin) DO UPDATE SET {column} = {column} + excluded.{column}""",
            (origin, value),
        )
