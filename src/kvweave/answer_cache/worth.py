"""Cost and use of each kind of prediction, counted since the documents last changed.

A kind that costs more than it saves is paused until the documents change.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from kvweave.database import Database

PredictionOrigin: TypeAlias = Literal["knowledge", "history"]
"""What a question was predicted from: the summary alone, or earlier questions too."""

LEAST_ASKED: Final = 30
"""Questions that users ask, with predictions of a kind ready, before the kind is judged."""

LEAST_WORK: Final = 20.0
"""Work on a kind before it is judged, in answers: the time that answering so many questions ahead takes."""

WORK_PER_HIT: Final = 50.0
"""The most work, in answers, that one answer given to a user is worth."""


@dataclass(frozen=True, slots=True)
class PredictionStatus:
    """Cost and use of one kind of prediction since the documents last changed.

    Attributes:
        ready: its questions that were answered ahead.
        asked: questions that users asked since then, and `hits` those that got an answer from it.
        seconds: of work.
        work: the same in answers: how many could have been computed in that time; None before the first was.
        hits_per_work: hits per answer of work; None as before.
        paused: why nothing more is predicted in this way; empty while it pays, or has not been tried long enough.
    """

    ready: int
    asked: int
    hits: int
    seconds: float
    work: float | None
    hits_per_work: float | None
    paused: str


def prediction_status(
    ready: int, asked: int, hits: int, seconds: float, answer_s: float | None
) -> PredictionStatus:
    """Return the status for these counts; `answer_s` is the mean seconds of answering a question ahead, None before the first."""
    work = seconds / answer_s if answer_s else None
    paused = ""
    if work is not None and work >= LEAST_WORK and asked >= LEAST_ASKED and hits * WORK_PER_HIT < work:
        paused = (
            f"{hits} of {asked} questions were answered from it for the work of {work:.0f} answers; it starts "
            "again when documents change"
        )
    return PredictionStatus(ready, asked, hits, seconds, work, hits / work if work else None, paused)


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

    def add(self, origin: PredictionOrigin, *, ready: int = 0, hits: int = 0, seconds: float = 0.0) -> None:
        """Count questions that were answered ahead, answers given to users, and work."""
        self._database.execute(
            """INSERT INTO prediction_worth (origin, ready, hits, seconds) VALUES (?, ?, ?, ?)
               ON CONFLICT (origin) DO UPDATE SET ready = ready + excluded.ready, hits = hits + excluded.hits,
                 seconds = seconds + excluded.seconds""",
            (origin, ready, hits, seconds),
        )

    def all(self, answer_s: float | None) -> dict[PredictionOrigin, PredictionStatus]:
        """Return the status of every kind; `answer_s` as in `prediction_status`."""
        rows = self._database.query("SELECT origin, ready, asked, hits, seconds FROM prediction_worth")
        found = {origin: (ready, asked, hits, seconds) for origin, ready, asked, hits, seconds in rows}
        return {
            origin: prediction_status(*found.get(origin, (0, 0, 0, 0.0)), answer_s)
            for origin in get_args(PredictionOrigin)
        }
