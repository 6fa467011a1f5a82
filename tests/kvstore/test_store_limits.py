import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave import files as atomic_file
from kvweave.errors import InvalidRequest
from kvweave.kvstore import capacity
from kvweave.kvstore.chunk_store import ChunkStore
from support.store_samples import chunk, entry_files, get, listed, put, same


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


@settings(max_examples=15, deadline=None)
@given(
    limit_bytes=st.integers(0, 8_000),
    tokens=st.lists(st.integers(0, 40), max_size=12),
    then=st.integers(0, 8_000),
)
def test_the_cap_is_never_exceeded(
    tmp_path_factory: pytest.TempPathFactory, limit_bytes: int, tokens: list[int], then: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with ChunkStore(folder, limit_bytes=limit_bytes) as store:
        for seed, count in enumerate(tokens):
            kv = chunk(seed, tokens=count)
            assert put(store, kv) == (get(store, kv) is not None)
            assert store.stats().bytes == bytes_on_disk(folder) <= limit_bytes
        store.set_limit(then)
        assert store.stats().bytes == bytes_on_disk(folder) <= then


def test_verify_corrects_the_counters_by_the_sizes_of_the_files(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(3):
            put(store, chunk(seed))
        store.database.execute("UPDATE entries SET bytes = bytes + 1000 WHERE id = 2")
        store.catalog.recount()
        assert store.used_bytes == bytes_on_disk(tmp_path) + 1000
        report = store.verify()
        assert (report.checked, report.damaged, report.miscounted, report.sound) == (3, (), True, False)
        assert store.used_bytes == bytes_on_disk(tmp_path)
        assert store.verify().sound


def test_entries_are_evicted_before_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def write(path: Path, parts: object) -> None:
        seen.append(bytes_on_disk(tmp_path))
        atomic_file.write_atomically(path, parts)  # type: ignore[arg-type]

    monkeypatch.setattr("kvweave.kvstore.tiers.disk.write_atomically", write)
    with ChunkStore(tmp_path) as store:
        put(store, chunk(0))
        size = store.stats().bytes
        store.set_limit(2 * size + size // 2)
        for seed in range(1, 5):
            assert put(store, chunk(seed))
        assert seen == [0, size, size, size, size]
        assert store.stats().evicted == 3
        assert store.evicted == 3


def test_the_least_retrieved_entries_are_evicted_first(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(4):
            put(store, chunk(seed))
        for seed, times in ((0, 2), (1, 1), (2, 3)):
            for _ in range(times):
                get(store, chunk(seed))
        size = store.stats().bytes // 4
        for kept, expected in ((3, {0, 1, 2}), (2, {0, 2}), (1, {2})):
            store.set_limit(kept * size + 10)
            names = {seed for seed in range(4) if listed(store, chunk(seed)) == [True]}
            assert names == expected


def test_a_new_entry_is_not_its_own_victim(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(0))
        for _ in range(3):
            get(store, chunk(0))
        store.set_limit(store.stats().bytes + 10)
        assert put(store, chunk(1))
        assert same(get(store, chunk(1)), chunk(1))
        assert get(store, chunk(0)) is None


def test_an_entry_over_the_cap_is_refused_with_one_warning_and_evicts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore(tmp_path, limit_bytes=3000) as store, caplog.at_level(logging.WARNING, "kvweave"):
        assert put(store, chunk(0))
        assert not put(store, chunk(1, tokens=500))
        assert not put(store, chunk(2, tokens=500))
        assert get(store, chunk(0)) is not None
    assert caplog.text.count("over the limit of 3000") == 1


def test_the_default_is_settled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda _: usage)
    with ChunkStore(tmp_path / "a") as store:
        assert store.limit_bytes == 10**8
    usage.free = 10**6  # type: ignore[attr-defined]
    with ChunkStore(tmp_path / "a") as store:
        assert store.limit_bytes == 10**8
        store.set_limit(12345)
    with ChunkStore(tmp_path / "a") as store:
        assert store.limit_bytes == 12345
        with pytest.raises(InvalidRequest, match="-1 bytes"):
            store.set_limit(-1)
    usage.free = 10**15  # type: ignore[attr-defined]
    with ChunkStore(tmp_path / "b") as store:
        assert store.limit_bytes == 20 * 10**9


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_warning_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with ChunkStore(tmp_path) as store, caplog.at_level(logging.WARNING, "kvweave"):
        put(store, chunk(0))
        with monkeypatch.context() as patch:
            patch.setattr("kvweave.files.os.fsync", full)
            assert not put(store, chunk(1))
            assert not put(store, chunk(2))
        assert caplog.text.count("the disk is full") == 1
        assert len(entry_files(tmp_path)) == len(list(tmp_path.glob("??/*"))) == 1
        assert put(store, chunk(1))


def test_a_disk_too_full_even_after_evictions_evicts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(0))
        store.set_limit(store.used_bytes + 1000)
        usage = type("Usage", (), {"free": capacity.RESERVE_AT_MOST_BYTES, "total": 10**12})
        with monkeypatch.context() as patch:
            patch.setattr(capacity.shutil, "disk_usage", lambda _: usage)
            assert not put(store, chunk(1, tokens=10))  # larger than the entry it would replace
            assert same(get(store, chunk(0)), chunk(0))
            usage.free += 2000  # type: ignore[attr-defined]
            assert put(store, chunk(1, tokens=10))
        assert listed(store, chunk(0), chunk(1, tokens=10)) == [False, True]


def test_another_write_error_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    with ChunkStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr("kvweave.files.os.fsync", broken)
            with pytest.raises(OSError, match="broken"):
                put(store, chunk(1))
        assert list(tmp_path.glob("??/*")) == []
        assert store.stats().entries == 0


def test_a_file_whose_row_cannot_be_written_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> bool:
        raise RuntimeError("no row")

    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(store.catalog, "insert", fail)
        with pytest.raises(RuntimeError, match="no row"):
            put(store, chunk(1))
        assert list(tmp_path.glob("??/*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a size-limited file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a size-limited file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("reserve", [0, capacity.RESERVE_AT_MOST_BYTES])
def test_a_full_file_system_degrades_to_computing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reserve: int
) -> None:
    monkeypatch.setattr(capacity, "RESERVE_AT_MOST_BYTES", reserve)
    chunks = [chunk(seed, tokens=300) for seed in range(60)]
    with caplog.at_level(logging.WARNING, "kvweave"):
        with ChunkStore(small_disk, limit_bytes=10**9) as store:
            stored = [kv for kv in chunks if put(store, kv)]
            assert 3 < len(stored) < 60
            assert [record.msg for record in caplog.records] == ["chunk KV not stored, computing instead: %s"]
            assert all(same(get(store, kv), kv) for kv in stored)
            assert list(small_disk.glob("??/*.tmp-*")) == []
            assert len(entry_files(small_disk)) == store.stats().entries == len(stored)
        with ChunkStore(small_disk) as store:
            assert store.verify().sound
            if reserve:  # without it the disk may be too full even to record a removal
                store.set_limit(300_000)
                assert put(store, chunk(99, tokens=300))


@pytest.mark.root
def test_a_disk_filled_by_other_programs_never_raises(small_disk: Path) -> None:
    with ChunkStore(small_disk) as store:
        store.set_limit(10**9)
        assert put(store, chunk(0))
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        assert not put(store, chunk(1))
        assert same(get(store, chunk(0)), chunk(0))
        assert store.stats().entries == 1
    with ChunkStore(small_disk) as store:
        assert same(get(store, chunk(0)), chunk(0))
        ballast.unlink()
        assert put(store, chunk(1))
