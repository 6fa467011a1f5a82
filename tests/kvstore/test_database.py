import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvweave import database as module
from kvweave.database import Database
from kvweave.errors import StoreBusy, StoreError, StoreFull, StoreTooNew
from kvweave.kvstore import chunk_store
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.chunk_store import ChunkStore
from support.fake_remote_tier import FakeRemoteTier
from support.store_samples import chunk, entry_files, get, put


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Every connection opened from here on."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*args: object, **options: object) -> sqlite3.Connection:
        opened.append(connect(*args, **options))  # type: ignore[call-overload]
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    return opened


def is_open(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT 1")
    except sqlite3.ProgrammingError:
        return False
    return True


def test_threads_take_turns_with_few_connections(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    """One for each thread would stay in memory for as long as the threads of a server live."""
    database = Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x)"])
    with ThreadPoolExecutor(40) as threads:
        together = threading.Barrier(40)

        def write(number: int) -> None:
            together.wait(30)
            with database.transaction():
                database.execute("INSERT INTO t VALUES (?)", (number,))
                database.query("SELECT * FROM t")

        list(threads.map(write, range(40)))
        assert sum(map(is_open, connections)) <= 3
        used = len(connections)
        assert [threads.submit(database.query, "SELECT count(*) FROM t").result() for _ in range(40)] == [
            [(40,)]
        ] * 40
        assert len(connections) == used
    database.close()
    assert not any(map(is_open, connections))


def test_a_transaction_keeps_its_connection_to_itself(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x)"])
    with ThreadPoolExecutor(1) as threads:
        with database.transaction():
            database.execute("INSERT INTO t VALUES (1)")
            assert threads.submit(database.query, "SELECT * FROM t").result() == []
            assert not threads.submit(lambda: database.in_transaction).result()
        assert threads.submit(database.query, "SELECT * FROM t").result() == [(1,)]
    database.close()


def test_a_catalogue_whose_tables_have_damaged_names_is_refused_in_one_line(tmp_path: Path) -> None:
    """SQLite quotes the damaged text in its message, which Python cannot read then; the campaign found it."""
    path = tmp_path / "db"
    database = Database(path)
    database.script(["CREATE TABLE t (x TEXT)"])
    database.close()
    whole = path.read_bytes()
    for byte in (b"CREATE TABLE t \xa0x TEXT)", b"CREATE TABL\xe5 t (x TEXT)"):
        path.write_bytes(whole.replace(b"CREATE TABLE t (x TEXT)", byte))
        with pytest.raises(StoreError, match=r"db is not a readable catalogue .* move it away"):
            Database(path).query("SELECT * FROM t")


def test_a_catalogue_that_cannot_be_opened_leaves_no_connection(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"db is not a readable catalogue .* move it away"):
        Database(tmp_path / "db")
    assert not any(map(is_open, connections))


@pytest.mark.parametrize("given", [False, True])
def test_a_store_that_cannot_be_opened_closes_everything_except_a_given_database(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connections: list[sqlite3.Connection],
    given: bool,
) -> None:
    tier = FakeRemoteTier()
    monkeypatch.setattr(chunk_store, "open_remote_tier", lambda url, namespace: tier)

    def refused(*_: object) -> None:
        raise StoreFull("no space left")

    monkeypatch.setattr(Capacity, "set_limit", refused)
    database = Database(tmp_path / "db") if given else None
    with pytest.raises(StoreFull):
        ChunkStore(tmp_path, database=database, shared="of the test", limit_bytes=10**6)
    assert tier.calls == ["close"]
    assert [is_open(connection) for connection in connections] == [given]
    if database is not None:
        database.close()


def test_a_damaged_database_raises_a_store_error_everywhere(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x TEXT)", "CREATE INDEX i ON t (x)"])
    database.execute_many("INSERT INTO t VALUES (?)", [("text" * 100,)] * 500)
    database.close()
    whole = (tmp_path / "db").read_bytes()
    (tmp_path / "db").write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    database = Database(tmp_path / "db")
    for action in (
        lambda: database.query("SELECT * FROM t"),
        lambda: database.execute("DELETE FROM t"),
        lambda: database.execute_many("INSERT INTO t VALUES (?)", [("x",)]),
        lambda: database.script(["DROP TABLE t"]),
    ):
        with pytest.raises(StoreError, match=r"db is not a readable catalogue .*malformed.* move it away"):
            action()
        assert not database.in_transaction
    database.close()


def test_a_lock_held_too_long_and_a_full_disk_have_their_own_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_WAIT_S", 0.05)
    database, other = Database(tmp_path / "db"), Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x BLOB)"])
    with database.transaction(), pytest.raises(StoreBusy, match="locked by another process"):
        other.execute("INSERT INTO t VALUES (1)")
    pages = database.query("PRAGMA page_count")[0][0]
    database.query(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFull, match="no space left"):
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert database.query("SELECT * FROM t") == []
    other.close()
    database.close()


def test_an_interrupt_while_waiting_for_the_lock_leaves_no_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_WAIT_S", 10.0)
    database, other = Database(tmp_path / "db"), Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x)"])
    held = threading.Event()

    def hold_and_interrupt() -> None:
        with other.transaction():
            held.set()
            time.sleep(0.3)  # by now the other thread waits
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    holder = threading.Thread(target=hold_and_interrupt)
    holder.start()
    assert held.wait(10)
    with pytest.raises(KeyboardInterrupt):
        database.execute("INSERT INTO t VALUES (1)")
    holder.join()
    assert not database.in_transaction
    other.execute("INSERT INTO t VALUES (2)")  # the lock is free
    database.execute("INSERT INTO t VALUES (3)")
    assert other.query("SELECT x FROM t") == [(2,), (3,)]
    database.close()
    other.close()


def test_programming_errors_are_not_translated(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x PRIMARY KEY)"])
    with pytest.raises(sqlite3.IntegrityError):
        database.execute_many("INSERT INTO t VALUES (?)", [(1,), (1,)])
    assert database.query("SELECT * FROM t") == []
    database.close()


def test_a_catalogue_of_a_newer_version_is_refused_and_unchanged(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
    (file,) = entry_files(tmp_path)
    catalogue = tmp_path / "catalog.sqlite"
    with closing(sqlite3.connect(catalogue)) as connection:
        connection.execute("PRAGMA user_version = 9")
    before = catalogue.read_bytes()
    with pytest.raises(StoreTooNew, match=r"newer kvweave \(catalogue version 9, this one reads up to 1\)"):
        ChunkStore(tmp_path)
    assert catalogue.read_bytes() == before
    assert file.exists()


def in_fork(work: Callable[[], object]) -> str:
    """Return what `work` returns or raises in a forked process, as text; it has a minute."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            said = str(work())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_process_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        put(store, kv)
        refused = f"StoreError: {tmp_path / 'catalog.sqlite'} was opened before this process was forked"
        assert in_fork(store.stats).startswith(refused)
        assert in_fork(lambda: get(store, kv)).startswith(refused)
        assert in_fork(store.close) == "None"
        assert get(store, kv) is not None
        assert in_fork(lambda: ChunkStore(tmp_path).stats().entries) == "1"
