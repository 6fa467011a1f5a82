"""Entries, tokens and bytes per tier and kind, counted by SQLite triggers whenever a row is inserted or deleted.

Reading a store's size costs the same for ten entries and for a million, and no statement about entries can forget to count.
Knows nothing of what an entry is.
"""

from dataclasses import dataclass

from kvweave.database import Database

_TABLE = """CREATE TABLE IF NOT EXISTS store_totals (
    tier TEXT NOT NULL, kind TEXT NOT NULL, entries INTEGER NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL, unasked_bytes INTEGER NOT NULL, PRIMARY KEY (tier, kind)) WITHOUT ROWID"""
_NUMBERS = "entries, tokens, bytes, unasked_bytes"


@dataclass(frozen=True, slots=True)
class Total:
    """Number of entries, their tokens and bytes; `unused_bytes` of them were never found by a look-up."""

    entries: int = 0
    tokens: int = 0
    bytes: int = 0
    unused_bytes: int = 0


class Totals:
    """The table `store_totals` of `database`, which the triggers of `counting_triggers` keep."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script([_TABLE])

    def by_kind(self, tier: str) -> dict[str, Total]:
        """Return the totals of each kind of which the tier holds any entry."""
        rows = self._database.query(
            f"SELECT kind, {_NUMBERS} FROM store_totals WHERE tier = ? AND entries <> 0", (tier,)
        )
        return {kind: Total(*numbers) for kind, *numbers in rows}

    def of_tier(self, tier: str) -> Total:
        """Return the totals of all kinds together."""
        (numbers,) = self._database.query(
            """SELECT COALESCE(SUM(entries), 0), COALESCE(SUM(tokens), 0), COALESCE(SUM(bytes), 0),
                      COALESCE(SUM(unasked_bytes), 0) FROM store_totals WHERE tier = ?""",
            (tier,),
        )
        return Total(*numbers)

    def recount(self, tier: str, counting: str) -> bool:
        """Correct a tier's totals by counting its rows; return whether they were right.

        `counting` is a SELECT that returns rows of kind, entries, tokens, bytes and unused bytes.
        """
        with self._database.transaction():
            counted = {kind: Total(*numbers) for kind, *numbers in self._database.query(counting)}
            right = self.by_kind(tier) == counted
            if not right:
                self._database.execute("DELETE FROM store_totals WHERE tier = ?", (tier,))
                self._database.execute_many(
                    f"INSERT INTO store_totals (tier, kind, {_NUMBERS}) VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (tier, kind, total.entries, total.tokens, total.bytes, total.unused_bytes)
                        for kind, total in counted.items()
                    ],
                )
        return right


def counting_triggers(table: str, tier: str, *, kind: str, uses: str | None) -> tuple[str, ...]:
    """Return schema statements that count the rows of `table` as entries of `tier`.

    Args:
        table: has the columns `tokens` and `bytes`; after an update of them `recount` must be called.
        tier: the tier to count them for.
        kind: the column that distinguishes kinds.
        uses: the column that counts look-ups, None if there is none.
    """
    unasked = {row: f"({row}.bytes * ({row}.{uses} = 0))" if uses else "0" for row in ("NEW", "OLD")}
    statements = [
        _TABLE,
        f"""CREATE TRIGGER IF NOT EXISTS {table}_come AFTER INSERT ON {table} BEGIN
            INSERT INTO store_totals VALUES ('{tier}', NEW.{kind}, 1, NEW.tokens, NEW.bytes, {unasked["NEW"]})
            ON CONFLICT (tier, kind) DO UPDATE SET entries = entries + 1, tokens = tokens + NEW.tokens,
                bytes = bytes + NEW.bytes, unasked_bytes = unasked_bytes + {unasked["NEW"]};
            END""",
        f"""CREATE TRIGGER IF NOT EXISTS {table}_go AFTER DELETE ON {table} BEGIN
            UPDATE store_totals SET entries = entries - 1, tokens = tokens - OLD.tokens,
                bytes = bytes - OLD.bytes, unasked_bytes = unasked_bytes - {unasked["OLD"]}
            WHERE tier = '{tier}' AND kind = OLD.{kind};
            END""",
    ]
    if uses:
        statements.append(
            f"""CREATE TRIGGER IF NOT EXISTS {table}_asked AFTER UPDATE OF {uses} ON {table}
                WHEN OLD.{uses} = 0 AND NEW.{uses} > 0 BEGIN
                UPDATE store_totals SET unasked_bytes = unasked_bytes - OLD.bytes
                WHERE tier = '{tier}' AND kind = OLD.{kind};
                END"""
        )
    return tuple(statements)
