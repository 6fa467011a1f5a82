"""Entries, tokens and bytes per tier and kind, counted by SQLite itself whenever a row comes or goes.

So that asking for the size of a store costs the same whether it holds ten entries or a million, and so that no statement
about entries can forget to count. Knows neither what an entry is nor who asks.
"""

from dataclasses import dataclass

from kvweave.database import Database

_TABLE = """CREATE TABLE IF NOT EXISTS store_totals (
    tier TEXT NOT NULL, kind TEXT NOT NULL, entries INTEGER NOT NULL, tokens INTEGER NOT NULL,
    bytes INTEGER NOT NULL, unasked_bytes INTEGER NOT NULL, PRIMARY KEY (tier, kind)) WITHOUT ROWID"""
_NUMBERS = "entries, tokens, bytes, unasked_bytes"


@dataclass(frozen=True, slots=True)
class Total:
    """How many entries, their tokens and bytes; `unasked_bytes` of them no look-up has ever found."""

    entries: int = 0
    tokens: int = 0
    bytes: int = 0
    unasked_bytes: int = 0


def counted(table: str, tier: str, *, kind: str, uses: str | None) -> tuple[str, ...]:
    """Schema statements that have the rows of `table` counted as those of `tier`.

    Args:
        table: has the columns `tokens` and `bytes`, which no row changes, unless a `recount` follows.
        tier: what the rows are counted as.
        kind: the column that tells kinds apart.
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


class Totals:
    """The table `store_totals` of `database`, which the triggers of `counted` keep."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.script([_TABLE])

    def by_kind(self, tier: str) -> dict[str, Total]:
        """The totals of each kind that the tier holds any of."""
        rows = self._database.query(
            f"SELECT kind, {_NUMBERS} FROM store_totals WHERE tier = ? AND entries <> 0", (tier,)
        )
        return {kind: Total(*numbers) for kind, *numbers in rows}

    def of(self, tier: str) -> Total:
        """The totals of all kinds together."""
        (numbers,) = self._database.query(
            """SELECT COALESCE(SUM(entries), 0), COALESCE(SUM(tokens), 0), COALESCE(SUM(bytes), 0),
                      COALESCE(SUM(unasked_bytes), 0) FROM store_totals WHERE tier = ?""",
            (tier,),
        )
        return Total(*numbers)

    def recount(self, tier: str, counting: str) -> bool:
        """Put the totals of a tier right by the rows that `counting` (a SELECT) finds; whether they were right.

        The rows are: kind, entries, tokens, bytes, unasked bytes.
        """
        with self._database.transaction():
            counted_anew = {kind: Total(*numbers) for kind, *numbers in self._database.query(counting)}
            right = self.by_kind(tier) == counted_anew
            if not right:
                self._database.execute("DELETE FROM store_totals WHERE tier = ?", (tier,))
                self._database.execute_many(
                    f"INSERT INTO store_totals (tier, kind, {_NUMBERS}) VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (tier, kind, t.entries, t.tokens, t.bytes, t.unasked_bytes)
                        for kind, t in counted_anew.items()
                    ],
                )
        return right
