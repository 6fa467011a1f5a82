import sqlite3
import threading
from pathlib import Path

import pytest

from kvweave.errors import StoreBusy, StoreError, StoreFull
from kvweave.store import database as module
from kvweave.store.database import Database


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


def test_connections_of_ended_threads_are_closed(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    database = Database(tmp_path / "db")
    for _ in range(5):
        thread = threading.Thread(target=database.query, args=("SELECT 1",))
        thread.start()
        thread.join()
    assert [is_open(connection) for connection in connections] == [True] + [False] * 5
    database.close()
    assert not any(map(is_open, connections))


def test_a_catalogue_that_cannot_be_opened_leaves_no_connection(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    (tmp_path / "db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=r"db is not a readable catalogue .* move it away"):
        Database(tmp_path / "db")
    assert not any(map(is_open, connections))


def test_damage_under_way_is_a_store_error_everywhere(tmp_path: Path) -> None:
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


def test_a_lock_kept_too_long_and_a_full_disk_have_their_own_errors(
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


def test_our_own_mistakes_are_not_dressed_up(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    database.script(["CREATE TABLE t (x PRIMARY KEY)"])
    with pytest.raises(sqlite3.IntegrityError):
        database.execute_many("INSERT INTO t VALUES (?)", [(1,), (1,)])
    assert database.query("SELECT * FROM t") == []
    database.close()
