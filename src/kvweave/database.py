"""SQLite in WAL mode with one way to write: a transaction that commits whole or leaves nothing.

Several processes and threads may share one file. Its commits decide for the whole knowledge base: a
file or a vector row that no committed row lists does not exist for readers. Knows nothing about what the
tables mean; the modules that use a table create it.
"""

import os
import shutil
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvweave.errors import StoreBusy, StoreError, StoreFull, StoreReadOnly, StoreTooNew

SCHEMA_VERSION = 1
BUSY_WAIT_S = 30.0
_LOG_PAGES = 256
"""The log goes into the file once it has so many pages of 4 KiB: its room on the disk is not given back before the last close."""
_CACHE_KIB = 256
"""Of pages in each connection: a server has some for each knowledge base, and the system keeps the files' pages anyway."""
_IDLE_CONNECTIONS = 3
"""That a database keeps open for the next thread. A statement takes less than a millisecond, so that few run at once."""

_PROGRAMMING_ERRORS = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.DataError)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_UNREADABLE = "{path} is not a readable catalogue ({why}); move it away to start from scratch"


class Database:
    """One SQLite file. A thread has a connection while it runs a statement or a transaction, and then leaves it to the others.

    One for each thread would stay with it: a server's threads each come to every knowledge base some time, and connections
    would grow to the product of both, at 0.4 MB each.

    Of a file that can be read but not written to, a temporary copy is used: what is written is forgotten when it is closed. What
    must not be forgotten calls `check_writable` first.

    A process that was forked since cannot use it: each use raises StoreError, and closing does nothing. SQLite forbids to carry a
    connection over a fork, and the threads of torch and LanceDB, which the caller is about to use, do not survive one.

    Errors of SQLite are raised as a StoreError that names the file and says what to do. StoreTooNew: a newer
    kvweave wrote it. StoreBusy: another process holds the write lock for longer than `BUSY_WAIT_S`. StoreFull:
    the disk is full. StoreError itself: the file is damaged, is no database or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._local = threading.local()  # `session`: this thread's, inside a transaction
        self._closed = False
        self._process = os.getpid()
        self._sessions: weakref.WeakSet[_Session] = weakref.WeakSet()
        self._idle: list[_Session] = []
        self._guard = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be used as a folder: {error.strerror}") from error
        if path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
            self._copy = _temporary_copy(path)
        try:
            self._check_version()
        except StoreError:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed or self._forked

    @property
    def read_only(self) -> bool:
        """Whether the file cannot be written to, so that writes are forgotten."""
        return self._copy is not None

    def check_writable(self) -> None:
        """Raise StoreReadOnly if writes are forgotten."""
        if self.read_only:
            raise StoreReadOnly(
                f"{self.path.parent} is read-only: what it holds can be asked about, but nothing can be added, changed or "
                "removed; check the permissions and how the disk is mounted, or use another --home"
            )

    @property
    def in_transaction(self) -> bool:
        """Whether this thread is inside a `transaction`."""
        return self._own() is not None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything executed inside together, or nothing if an exception leaves the block.

        Takes the write lock at once, so no other writer comes between a read and a write inside it. Blocks
        nested in the same thread join the outer one.
        """
        if self._own() is not None:
            yield
            return
        with self._session() as session:
            try:
                self._local.session = session
                # Inside the try: an interrupt during the wait for the lock is raised once the lock is held.
                self._run(session, "BEGIN IMMEDIATE")
                yield
                self._run(session, "COMMIT")
            except BaseException:
                session.after_commit = []
                # SQLite rolls back by itself on some errors, a full disk among them.
                if session.connection.in_transaction:
                    self._run(session, "ROLLBACK")
                raise
            finally:
                self._local.session = None
            actions, session.after_commit = session.after_commit, []
        for action in actions:
            action()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` once the surrounding transaction has committed; immediately outside of one.

        It is never called after a rollback. For actions that cannot be rolled back, such as deleting files.
        """
        session = self._own()
        if session is not None:
            session.after_commit.append(action)
        else:
            action()

    def script(self, statements: Sequence[str]) -> None:
        """Run schema statements (CREATE … IF NOT EXISTS) in one transaction."""
        with self.transaction(), self._session() as session:
            for statement in statements:
                self._run(session, statement)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement and return how many rows it changed. Outside a transaction, it commits at once."""
        with self.transaction(), self._session() as session:
            return self._run(session, sql, values).rowcount

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of values, in one transaction."""
        with self.transaction(), self._session() as session, self._translated_errors():
            session.connection.executemany(sql, rows)

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a SELECT."""
        with self._session() as session, self._translated_errors():
            return session.connection.execute(sql, values).fetchall()

    def scrub(self) -> bool:
        """Write the file anew and empty the write-ahead log; return False if others keep them in use, or the disk is full.

        `secure_delete` overwrites deleted rows, but not the copies that SQLite leaves in a page's free space when it moves rows
        between pages.
        """
        try:
            self.query("VACUUM")
        except StoreError:
            return False
        ((busy, _, _),) = self.query("PRAGMA wal_checkpoint(TRUNCATE)")
        return not busy

    def close(self) -> None:
        """Close every connection; using the database afterwards raises StoreError."""
        if self._forked:
            return
        with self._guard:
            self._closed = True
            for session in self._sessions:
                session.close()
            self._sessions.clear()
            self._idle.clear()
        if self._copy is not None:
            self._copy.cleanup()

    def _check_version(self) -> None:
        version = int(self.query("PRAGMA user_version")[0][0])
        if version > SCHEMA_VERSION:
            raise StoreTooNew(
                f"{self.path} was written by a newer kvweave (catalogue version {version}, this one reads up to "
                f"{SCHEMA_VERSION}); upgrade kvweave, or use another --home"
            )
        if version < SCHEMA_VERSION:  # not otherwise: an existing file must open without room to write
            self.query(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _own(self) -> "_Session | None":
        """Return the connection of this thread's transaction; None outside of one."""
        if self._forked:
            raise StoreError(
                f"{self.path} was opened before this process was forked, and cannot be used here: open the knowledge base or store "
                "in each process after the fork, or start processes with spawn"
            )
        if self._closed:
            raise StoreError(f"{self.path} was closed; open the knowledge base or store again")
        return getattr(self._local, "session", None)

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    @contextmanager
    def _session(self) -> Iterator["_Session"]:
        """Give this thread a connection: that of its transaction, or one that no thread uses meanwhile."""
        own = self._own()
        if own is not None:
            yield own
            return
        with self._guard:
            session = self._idle.pop() if self._idle else None
        if session is None:
            with self._translated_errors():
                session = _Session(self.path if self._copy is None else Path(self._copy.name, self.path.name))
            with self._guard:
                self._sessions.add(session)
        try:
            yield session
        finally:
            self._leave(session)

    def _leave(self, session: "_Session") -> None:
        """Keep a connection for the next thread, or close it."""
        with self._guard:
            if not (self.closed or session.busy) and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(session)
                return
            self._sessions.discard(session)
        session.close()

    def _run(self, session: "_Session", sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._translated_errors():
            return session.connection.execute(sql, values)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except _PROGRAMMING_ERRORS:
            raise
        except sqlite3.DatabaseError as error:
            raise _translated(self.path, error) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes damaged text
            raise StoreError(_UNREADABLE.format(path=self.path, why="its text is damaged")) from error


class FactTable:
    """Numbers by name, in a table of `database` that is created if it is not there."""

    def __init__(self, database: Database, table: str) -> None:
        self._database, self._table = database, table
        database.script(
            [f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID"]
        )

    def get(self, name: str) -> float | None:
        """Return a recorded number, or None."""
        rows = self._database.query(f"SELECT value FROM {self._table} WHERE name = ?", (name,))
        return float(rows[0][0]) if rows else None

    def about(self, topic: str) -> dict[str, float]:
        """Return the numbers whose names are `topic`, a space and more, by what comes after the space."""
        rows = self._database.query(
            f"SELECT substr(name, ?), value FROM {self._table} WHERE substr(name, 1, ?) = ? ORDER BY name",
            (len(topic) + 2, len(topic) + 1, f"{topic} "),
        )
        return {name: float(value) for name, value in rows}

    def forget(self, topic: str) -> None:
        """Delete all that `about` returns."""
        self._database.execute(
            f"DELETE FROM {self._table} WHERE substr(name, 1, ?) = ?", (len(topic) + 1, f"{topic} ")
        )

    def add(self, name: str, by: float = 1.0) -> None:
        """Add to a number, which is 0 at first."""
        self._database.execute(
            f"INSERT INTO {self._table} VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, by),
        )

    def record(self, name: str, value: float) -> None:
        """Record a number in place of an earlier one."""
        self._database.execute(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", (name, value))


class _Session:
    """A connection, and the actions that follow its commit. The connection is closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(
            path, timeout=BUSY_WAIT_S, isolation_level=None, check_same_thread=False
        )
        self.close = weakref.finalize(self, self.connection.close)
        self.after_commit: list[Callable[[], None]] = []
        _switch_to_wal(self.connection)
        # A commit that was acknowledged survives a power cut, not only a crash of the process.
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
        self.connection.execute("PRAGMA foreign_keys = ON")
        # What is deleted is overwritten. Not every build of SQLite does so by itself.
        self.connection.execute("PRAGMA secure_delete = ON")

    @property
    def busy(self) -> bool:
        """Whether a transaction is open that could not be rolled back."""
        try:
            return self.connection.in_transaction
        except sqlite3.ProgrammingError:  # closed meanwhile
            return True


def _temporary_copy(path: Path) -> "tempfile.TemporaryDirectory[str]":
    """Copy a database that cannot be written to into a temporary folder, under its own name."""
    folder = tempfile.TemporaryDirectory(prefix="kvweave-")
    target = Path(folder.name, path.name)
    try:
        _copy_database(path, target)
    except (OSError, sqlite3.Error) as error:
        folder.cleanup()
        raise StoreError(f"{path} is read-only, and could not be copied to {folder.name}: {error}") from error
    return folder


def _copy_database(path: Path, target: Path) -> None:
    try:  # whole even while another user writes to it
        source = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_WAIT_S)
        copy = sqlite3.connect(target)
        try:
            source.backup(copy)
        finally:
            copy.close()
            source.close()
    except (
        sqlite3.OperationalError
    ):  # SQLite reads in WAL mode only beside its shared memory, which a writer has
        target.unlink(missing_ok=True)
        for suffix in ("", "-wal"):
            file = path.with_name(path.name + suffix)
            if file.exists():
                shutil.copyfile(file, target.with_name(file.name))


def _translated(path: Path, error: sqlite3.DatabaseError) -> StoreError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extended part
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space left for {path}; free some, or use another --home")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(
            f"{path} has been locked by another process for over {BUSY_WAIT_S:.0f} s; "
            "wait for it to finish, or stop it, and try again"
        )
    if code in _DAMAGED:
        return StoreError(_UNREADABLE.format(path=path, why=error))
    return StoreError(
        f"{path} cannot be read or written ({error}); check the permissions and the disk, or use another --home"
    )


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, waiting for the lock: SQLite itself gives up at once when two processes create the file."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
