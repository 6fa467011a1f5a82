"""SQLite in WAL mode with one way to write: a transaction that commits whole or leaves nothing.

Several processes and threads may share one file. Its commit is the truth of the whole knowledge base: a
file or a vector row that no committed row lists does not exist for readers. Knows nothing about what the
tables mean; each owner creates its own.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvweave.errors import StoreBusy, StoreError, StoreFull, StoreTooNew

SCHEMA_VERSION = 1
BUSY_WAIT_S = 30.0


class Database:
    """One SQLite file; a connection per thread, opened on first use.

    Raises StoreTooNew when a newer kvweave wrote the file, StoreBusy when another process holds the write
    lock for longer than `BUSY_WAIT_S`, StoreError when the file is not a database.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._guard = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            version = int(self._connection().execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.DatabaseError as error:
            self.close()
            raise StoreError(
                f"{path} is not a readable catalogue ({error}); move it away to start anew"
            ) from error
        if version > SCHEMA_VERSION:
            self.close()
            raise StoreTooNew(
                f"{path} was written by a newer kvweave (catalogue version {version}, this one reads up to "
                f"{SCHEMA_VERSION}); upgrade kvweave, or use another --home"
            )
        if version < SCHEMA_VERSION:  # an existing file can be read without room to write
            self._connection().execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                self.path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False
            )
            with self._guard:
                self._connections.append(connection)
            _switch_to_wal(connection)
            # A commit that was acknowledged survives a power cut, not only a crash of the process.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._local.connection = connection
            self._local.depth = 0
            self._local.after_commit = []
        return connection

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything executed inside commits together, or not at all if an exception leaves the block.

        Takes the write lock at once, so a read followed by a write inside it cannot be overtaken. Blocks
        nested in the same thread join the outer one. Raises StoreFull when the disk is full.
        """
        connection = self._connection()
        if self._local.depth:
            yield
            return
        self._begin(connection)
        self._local.depth = 1
        try:
            yield
            connection.execute("COMMIT")
        except BaseException as error:
            self._local.after_commit = []
            # SQLite rolls back by itself on some errors, a full disk among them.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._raise_if_full(error)
            raise
        finally:
            self._local.depth = 0
        actions, self._local.after_commit = self._local.after_commit, []
        for action in actions:
            action()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` once the surrounding transaction has committed; at once outside of one.

        Never called after a rollback. For what cannot be rolled back, such as deleting files.
        """
        self._connection()
        if self._local.depth:
            self._local.after_commit.append(action)
        else:
            action()

    def _raise_if_full(self, error: BaseException) -> None:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StoreFull(f"no space left for {self.path}; free some, or use another --home") from error

    def _begin(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise StoreBusy(
                f"{self.path} has been locked by another process for over {BUSY_WAIT_S:.0f} s; "
                "wait for it to finish, or stop it, and try again"
            ) from error

    def script(self, statements: Sequence[str]) -> None:
        """Run schema statements (CREATE … IF NOT EXISTS) in one transaction."""
        with self.transaction():
            for statement in statements:
                self._connection().execute(statement)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement; returns how many rows it changed. Commits at once outside a transaction."""
        with self.transaction():
            return self._connection().execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of values, in one transaction."""
        with self.transaction():
            self._connection().executemany(sql, rows)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""
        return self._connection().execute(sql, values).fetchall()

    def close(self) -> None:
        """Close every thread's connection; the object is unusable afterwards."""
        with self._guard:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._local = threading.local()


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Wait for the lock that the switch takes: SQLite itself gives up at once when two processes make the file."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
