"""Which questions the answer cache keeps within its limit: those that were used most, and lately."""

import json
import time
from typing import Final

from kvweave.answer_cache.entries import Entries
from kvweave.database import Database

AGE: Final = "age"
"""Its number in the table `bank_facts`."""


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
            (time.time(), AGE, id_),
        )

    def record_prediction(self, id_: int) -> None:
        """Give a predicted question a lower weight than any that a user asked, so that it is evicted first."""
        self._database.execute(
            """UPDATE banked_questions SET last_used = ?,
                 weight = coalesce((SELECT value FROM bank_facts WHERE name = ?), 0) WHERE id = ?""",
            (time.time(), AGE, id_),
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
                self._entries.increase(AGE, max(0.0, heaviest - self._entries.counter(AGE)))

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
