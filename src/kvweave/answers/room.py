"""The cap of the bank, and who goes when it is full: the least used, where what was used long ago counts less.

LFU with dynamic ageing: a question weighs as often as it was used plus the bank's age when it was last used, and the
age is the weight of the last one that had to go. What was popular once does not stay for ever.
"""

import json
import time
from typing import Final

from kvweave.answers.entries import Entries
from kvweave.store.database import Database

_AGE: Final = "age"
_PAGE_ROWS: Final = 256


class Room:
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
