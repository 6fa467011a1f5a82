import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.kvstore.chunk_store import ChunkStore
from support.killed_processes import Acknowledge, victims
from support.processes import child_processes
from support.store_samples import chunk, entry_files, get, listed, put, same, write_range

KILLS = 25


def nothing() -> None:
    """Everything that `put` needs is imported with this module."""


def put_forever(loaded: None, acknowledge: Acknowledge, folder: str, first: int, limit_bytes: int) -> None:
    """Put entry after entry, acknowledging each seed once `put` has returned True."""
    with ChunkStore(folder, limit_bytes=limit_bytes) as store:
        for seed in range(first, first + 100_000):
            if put(store, chunk(seed, tokens=200)):
                acknowledge(str(seed))


def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    with victims(tmp_path, nothing, put_forever, seed=7) as writers:
        for kill in range(KILLS):
            seeds = writers.killed_within(8, str(tmp_path / "kv"), kill * 100_000, 10**9)
            acknowledged += map(int, seeds)
            with ChunkStore(tmp_path / "kv") as store:
                assert all(listed(store, *(chunk(seed, tokens=200) for seed in acknowledged)))
    with ChunkStore(tmp_path / "kv") as store:
        report = store.verify()
        assert report.sound
        assert report.checked == store.stats().entries >= len(acknowledged) > KILLS
        for seed in random.Random(7).sample(acknowledged, 10):
            assert same(get(store, chunk(seed, tokens=200)), chunk(seed, tokens=200))


def test_a_writer_killed_while_it_evicts_leaves_no_row_without_its_file(tmp_path: Path) -> None:
    written = 0
    with victims(tmp_path, nothing, put_forever, seed=8) as writers:
        for kill in range(KILLS):
            written += len(writers.killed_within(8, str(tmp_path / "kv"), kill * 100_000, 100_000))
            with ChunkStore(tmp_path / "kv") as store:
                report = store.verify()
                assert report.sound
                assert report.checked == store.stats().entries
                assert store.stats().bytes <= 100_000
    assert written > KILLS


def test_two_writers_at_once_agree(tmp_path: Path) -> None:
    context = child_processes()
    seeds = list(range(100))
    children = [
        context.Process(target=write_range, args=(str(tmp_path), order, 60_000))
        for order in (seeds, seeds[::-1])
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    with ChunkStore(tmp_path) as store:
        report = store.verify()
        assert report.sound
        assert 0 < store.stats().bytes <= 60_000
        assert len(entry_files(tmp_path)) == store.stats().entries == report.checked


def _open(folder: str) -> None:
    ChunkStore(folder).close()


def test_many_processes_may_create_the_same_store_at_once(tmp_path: Path) -> None:
    context = child_processes()
    children = [context.Process(target=_open, args=(str(tmp_path / "store"),)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0


def test_after_commit_runs_after_the_outermost_commit_and_never_after_a_rollback(tmp_path: Path) -> None:
    database = Database(tmp_path / "db")
    seen: list[str] = []
    database.after_commit(lambda: seen.append("outside"))
    with database.transaction():
        with database.transaction():
            database.after_commit(lambda: seen.append("inside"))
        assert seen == ["outside"]
    assert seen == ["outside", "inside"]
    try:
        with database.transaction():
            database.after_commit(lambda: seen.append("rolled back"))
            raise ValueError
    except ValueError:
        pass
    with database.transaction():
        pass
    assert seen == ["outside", "inside"]
    database.close()


def test_a_store_serves_several_threads(tmp_path: Path) -> None:
    chunks = [chunk(seed) for seed in range(20)]
    with ChunkStore(tmp_path) as store, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda kv: put(store, kv), chunks * 3))
        assert all(pool.map(lambda kv: same(get(store, kv), kv), chunks * 3))
        assert store.stats().entries == len(entry_files(tmp_path)) == 20
        assert store.stats().hits == 60


def test_an_interrupt_right_after_the_commit_leaves_the_entry_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives during the commit and is raised right after it."""
    with ChunkStore(tmp_path) as store:
        commit = store.database.transaction

        @contextmanager
        def interrupted() -> Iterator[None]:
            with commit():
                yield
            if not store.database.in_transaction:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(store.database, "transaction", interrupted)
            with pytest.raises(KeyboardInterrupt):
                put(store, chunk(1))
    with ChunkStore(tmp_path) as store:
        assert store.stats().entries == 1
        assert same(get(store, chunk(1)), chunk(1))
