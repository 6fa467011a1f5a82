import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from kvweave.database import Database
from kvweave.errors import DamagedEntry, InvalidRequest, StoreError
from kvweave.kvstore import catalog, header, keys, kv_store
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import ParsedEntry
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.kvstore.tiers.disk import EntryFiles
from kvweave.types import ChunkKV, KVProvenance, Storage
from support.store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    entry_files,
    fingerprint,
    get,
    key_of,
    listed,
    put,
    quantised_chunk,
    same,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stored_entry_is_found_in_this_process_and_the_next(tmp_path: Path, dtype: torch.dtype) -> None:
    kv = chunk(1, dtype=dtype)
    with ChunkStore(tmp_path) as store:
        assert get(store, kv) is None
        assert put(store, kv)
        assert same(get(store, kv), kv)
    with ChunkStore(tmp_path) as store:
        assert same(get(store, kv), kv)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_kv_that_is_not_finite_is_refused_and_found_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    kv = chunk(1)
    kv.kv[0, 0, 0, 1, 0] = number
    with ChunkStore(tmp_path) as store:
        with pytest.raises(InvalidRequest, match="KV or a feature of NaN or infinity is not stored"):
            put(store, kv)
        with pytest.raises(InvalidRequest, match="NaN or infinity"):
            put(MemoryStore(), kv)
        put(store, chunk(2))
        with monkeypatch.context() as earlier:  # versions that stored it
            earlier.setattr(kv_store, "is_finite", lambda content: True)
            assert put(store, kv)
        report = store.verify()
        assert report.checked == 1
        assert [reason.partition(" holds ")[2] for reason in report.damaged] == ["NaN or infinity"]
        assert listed(store, kv, chunk(2)) == [False, True]


def test_a_chunk_without_tokens_can_be_stored(tmp_path: Path) -> None:
    empty = ChunkKV((), torch.zeros(2, 2, 1, 0, 4))
    with ChunkStore(tmp_path) as store:
        assert put(store, empty)
        assert same(get(store, empty), empty)


def test_many_are_found_in_the_order_asked_for(tmp_path: Path) -> None:
    chunks = [chunk(seed) for seed in range(4)]
    with ChunkStore(tmp_path) as store:
        assert [put(store, kv) for kv in chunks[:3]] == [True] * 3
        order = (2, 3, 0, 2)
        assert listed(store, *(chunks[i] for i in order)) == [True, False, True, True]
        found = store.find(MODEL, [(chunks[i].token_ids, [ISOLATED]) for i in order])
        assert found[1] is None
        assert all(
            one is not None and same(one[0], chunks[i]) for one, i in zip(found, order, strict=True) if i != 3
        )
        assert store.find(MODEL, []) == []
        assert listed(store) == []


def test_the_best_provenance_that_can_be_read_is_found_and_counted_once(tmp_path: Path) -> None:
    kv = chunk(1)
    best, good, last = (KVProvenance("observed", (SYSTEM, digit * 32)) for digit in "789")
    wanted = [(kv.token_ids, [best, good, last]), (chunk(2).token_ids, [best, good]), (kv.token_ids, [])]
    with ChunkStore(tmp_path) as store:
        put(store, kv, good)
        put(store, kv, last)
        for _ in range(3):
            found, absent, unasked = store.find(MODEL, wanted)
            assert found is not None
            assert same(found[0], kv)
            assert found[1] is good
            assert absent is unasked is None
        assert (store.stats().hits, store.stats().misses) == (3, 3)
        store.forget_recent()
        (good_file,) = store.catalog.paths([key_of(store, digest_tokens(kv.token_ids), good).digest]).values()
        (tmp_path / good_file).write_bytes(b"damaged")
        found = store.find(MODEL, wanted[:1])[0]
        assert found is not None
        assert found[1] is last
        assert (store.stats().hits, store.stats().misses, store.stats().damaged) == (4, 3, 1)
        for file in entry_files(tmp_path):
            file.unlink()
        store.forget_recent()
        assert store.find(MODEL, wanted[:1]) == [None]
        assert (store.stats().hits, store.stats().misses) == (4, 4)


def test_forgetting_asks_the_kernel_to_drop_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        put(store, chunk(2))
        get(store, chunk(1))  # files that were only written are in the page cache as well
        monkeypatch.setattr(
            os, "posix_fadvise", lambda fd, *rest: asked.append(os.fstat(fd).st_ino), raising=False
        )
        monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
        store.forget_recent()
        assert sorted(asked) == sorted(file.stat().st_ino for file in entry_files(tmp_path))
        entry_files(tmp_path)[0].unlink()
        store.forget_recent()
        monkeypatch.delattr(os, "posix_fadvise")
        store.forget_recent()


def test_an_entry_with_any_other_key_is_never_matched(tmp_path: Path) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path, namespace="one") as store, ChunkStore(tmp_path, namespace="two") as other:
        put(store, kv)
        assert get(other, kv) is None
        assert store.get(fingerprint("b" * 32), kv.token_ids, ISOLATED) is None
        assert store.get(MODEL, kv.token_ids[:-1], ISOLATED) is None
        for provenance in (
            KVProvenance("bare", ()),
            KVProvenance("isolated", ("6" * 32,)),
            KVProvenance("isolated", (SYSTEM,), exact=False),
            KVProvenance("isolated", (SYSTEM,), rope_regime="long"),
            KVProvenance("observed", (SYSTEM, "7" * 32)),
        ):
            assert get(store, kv, provenance) is None
        assert same(get(store, kv, KVProvenance("observed", (SYSTEM,))), kv)  # the label makes no difference


def test_putting_twice_stores_once(tmp_path: Path) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        assert put(store, kv)
        file = entry_files(tmp_path)
        before = file[0].stat().st_mtime_ns
        assert put(store, kv)
        assert entry_files(tmp_path) == file
        assert file[0].stat().st_mtime_ns == before
        assert store.stats().entries == 1


def test_the_slower_of_two_writers_deletes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as slower:
        monkeypatch.setattr(
            slower.catalog, "paths", lambda _: {}
        )  # it looked before the other process listed the entry
        assert put(store, kv)
        assert put(slower, kv)
        assert len(entry_files(tmp_path)) == 1
        assert same(get(store, kv), kv)


def test_a_damaged_file_is_a_counted_logged_miss_and_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        put(store, kv)
        (file,) = entry_files(tmp_path)
        altered = bytearray(file.read_bytes())
        altered[-3] ^= 16
        file.write_bytes(altered)
        with caplog.at_level(logging.WARNING, "kvweave"):
            assert get(store, kv) is None
        assert "altered in layer 1" in caplog.text
        assert entry_files(tmp_path) == []
        assert (store.stats().damaged, store.stats().entries) == (1, 0)
        assert put(store, kv)
        assert same(get(store, kv), kv)


def test_a_lost_file_is_damage_but_one_removed_with_its_row_is_a_plain_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        put(store, kv)
        paths = store.catalog.paths
        with monkeypatch.context() as patch:
            patch.setattr(store.catalog, "paths", lambda keys: (paths(keys), other.clear())[0])
            assert get(store, kv) is None
        assert store.stats().damaged == 0
        put(store, kv)
        entry_files(tmp_path)[0].unlink()
        assert get(store, kv) is None
        assert (store.stats().damaged, store.stats().entries) == (1, 0)


def test_a_newer_file_is_not_used_and_not_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(header, "FORMAT_VERSION", 9)
            put(store, kv)
        assert get(store, kv) is None
        report = store.verify()
        assert report.sound
        assert len(report.newer) == 1
        assert len(entry_files(tmp_path)) == 1


def test_entries_of_an_older_format_are_misses_and_verify_drops_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(header, "FORMAT_VERSION", 1)
            patch.setattr(keys, "FORMAT_VERSION", 1)
            put(store, kv)
        assert get(store, kv) is None
        assert (store.stats().misses, store.stats().damaged, store.stats().entries) == (1, 0, 1)
        assert put(store, kv)
        assert same(get(store, kv), kv)
        (why,) = store.verify().damaged
        assert "format version 1, which is not read any more" in why
        assert store.stats().entries == len(entry_files(tmp_path)) == 1
        assert same(get(store, kv), kv)


def test_a_damaged_layer_is_counted_once_and_its_entry_never_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv, other = chunk(1, layers=3), KVProvenance("bare", ())
    with ChunkStore(tmp_path) as store:
        put(store, kv)
        (file,) = entry_files(tmp_path)
        put(store, kv, other)
        altered = bytearray(file.read_bytes())
        altered[-3] ^= 16
        file.write_bytes(altered)
        wanted = [(kv.token_ids, [ISOLATED, other])]
        found = store.find(MODEL, wanted)[0]
        assert found is not None
        assert found[1] is ISOLATED
        assert torch.equal(found[0].layer(0), kv.kv[0])
        for _ in range(2):
            with (
                caplog.at_level(logging.WARNING, "kvweave"),
                pytest.raises(DamagedEntry, match="altered in layer 2"),
            ):
                found[0].layer(2)
        assert caplog.text.count("altered in layer 2") == 1
        assert (store.stats().damaged, store.stats().entries, len(entry_files(tmp_path))) == (1, 1, 1)
        again = store.find(MODEL, wanted)[0]
        assert again is not None
        assert again[1] is other
        assert same(again[0], kv)


def test_a_damaged_entry_is_never_found_again_even_if_it_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise StoreError("the disk takes no writes")

    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        put(store, kv)
    (file,) = entry_files(tmp_path)
    altered = bytearray(file.read_bytes())
    altered[-3] ^= 16
    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(store.catalog, "drop_file", read_only)
        monkeypatch.setattr(store.tiers.disk.files, "delete", lambda names: None)
        file.write_bytes(altered)
        found = store.find(MODEL, [(kv.token_ids, [ISOLATED])])[0]
        assert found is not None
        with pytest.raises(DamagedEntry):
            found[0].layer(1)
        assert store.find(MODEL, [(kv.token_ids, [ISOLATED])]) == [None]


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantised_kv_is_found_by_its_own_provenance_only(tmp_path: Path, storage: Storage) -> None:
    kv, exact = quantised_chunk(1, storage), chunk(1)
    provenance = quantised(ISOLATED, storage)
    assert (provenance.kind, provenance.exact, provenance.context) == (
        f"isolated-{storage}",
        False,
        ISOLATED.context,
    )
    with ChunkStore(tmp_path) as store:
        assert put(store, kv, provenance)
        assert get(store, exact) is None
        assert same(get(store, exact, provenance), kv)
        assert put(store, exact)
        assert same(get(store, exact), exact)
        assert store.stats().by_kind.keys() == {"isolated", f"isolated-{storage}"}
        with pytest.raises(InvalidRequest, match="quantised KV is never exact"):
            put(store, kv, KVProvenance("bare", ()))


def test_a_second_read_does_not_open_the_file_and_a_removed_entry_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        put(store, kv)
        first = get(store, kv)
        with monkeypatch.context() as patch:
            patch.setattr(store.tiers.disk.files, "open", None)
            assert get(store, kv) is first
        other.clear()
        assert get(store, kv) is None
        assert first is not None
        assert same(first, kv)  # found KV stays valid


def test_recently_opened_entries_are_bounded_by_number_and_bytes(tmp_path: Path) -> None:
    def opened(size_bytes: int = 100) -> ParsedEntry:
        key = EntryKey("default", MODEL.digest, digest_tokens(chunk(0).token_ids), ISOLATED)
        return ParsedEntry(key, "tiny", (), chunk(0), torch.zeros(size_bytes, dtype=torch.uint8))

    files = EntryFiles(tmp_path, max_entries=3, max_bytes=200)
    for seed in range(3):
        files.remember(str(seed), opened())
    assert [files.recent(str(seed)) is None for seed in range(3)] == [True, False, False]
    files.recent("1")
    files.remember("3", opened())
    assert [files.recent(str(seed)) is None for seed in range(4)] == [True, False, True, False]
    files.remember("large", opened(size_bytes=500))
    assert files.recent("large") is None
    files = EntryFiles(tmp_path, max_entries=1)
    files.remember("a", opened())
    files.remember("b", opened())
    files.forget(["b", "never"])
    assert files.recent("a") is files.recent("b") is None


def test_counts_are_collected_in_memory_and_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "FLUSH_AFTER", 10)
    kv = chunk(1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path) as other:
        put(store, kv)
        for _ in range(9):
            get(store, kv)
        assert other.stats().hits == 0
        get(store, chunk(2))
        assert (other.stats().hits, other.stats().misses) == (9, 1)
        get(store, kv)
    with ChunkStore(tmp_path) as store:
        assert (store.stats().hits, store.stats().misses) == (10, 1)
        assert store.database.query("SELECT uses FROM entries") == [(10,)]


def test_stats_count_stored_entries(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        put(store, chunk(2), KVProvenance("bare", ()))
        store.put(fingerprint("b" * 32, "other/model"), chunk(3), ISOLATED, [])
        stats = store.stats()
        assert (stats.entries, stats.tokens) == (3, 15)
        assert stats.bytes == store.used_bytes == sum(file.stat().st_size for file in entry_files(tmp_path))
        assert {kind: total.entries for kind, total in stats.by_kind.items()} == {"bare": 1, "isolated": 2}


def test_clear_drops_everything_and_its_files(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        put(store, chunk(2))
        get(store, chunk(1))
        assert store.clear() == 2
        assert get(store, chunk(1)) is None
        assert entry_files(tmp_path) == []
        assert store.database.query("SELECT * FROM entry_sources") == []


def test_verify_finds_damaged_lost_and_swapped_files(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(4):
            put(store, chunk(seed))
        assert store.verify().sound
        cut, gone, swapped, _ = entry_files(tmp_path)
        shutil.copy(entry_files(tmp_path)[3], swapped)
        cut.write_bytes(cut.read_bytes()[:-1])
        gone.unlink()
        report = store.verify()
        assert len(report.damaged) == 3
        assert not report.sound
        assert store.stats().entries == len(entry_files(tmp_path)) == 1
        assert store.verify().sound


def test_verify_leaves_and_reports_files_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", name)

    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        with monkeypatch.context() as patch:
            patch.setattr(store.tiers.disk.files, "open", refuse)
            report = store.verify()
        assert (report.checked, report.damaged, len(report.unopened), report.sound) == (0, (), 1, False)
        assert store.verify().sound
        assert same(get(store, chunk(1)), chunk(1))


def test_a_look_up_never_fails_because_of_its_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog, "FLUSH_AFTER", 1)
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        store.database.execute("DROP TABLE store_counters")
        assert same(get(store, chunk(1)), chunk(1))
        store.database.script(catalog.COUNTERS_SCHEMA)

        def look_up_and_fail() -> None:
            with store.database.transaction():
                get(store, chunk(1))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            look_up_and_fail()
        assert store.stats().hits == 2  # a rollback loses no counts


def test_an_orphaned_file_is_invisible_and_swept_only_when_old(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        (file,) = entry_files(tmp_path)
        stray = file.with_name(f"{'0' * 32}.00000000.safetensors")
        shutil.copy(file, stray)
        dead = file.with_name(f"{file.name}.tmp-{2**22 + 1}-00")  # above the kernel's largest process id
        living = file.with_name(f"{file.name}.tmp-{os.getpid()}-00")
        for path in (dead, living):
            path.write_bytes(b"half")
        assert store.stats().entries == 1
        assert store.verify().swept_files == 0
        now = file.stat().st_mtime
        for path in (stray, dead, living):
            os.utime(path, (now - 120, now - 120))
        assert store.verify().swept_files == 1
        assert not dead.exists()
        assert living.exists()
        for path in (file, stray, living):
            os.utime(path, (now - 900, now - 900))
        assert store.verify().swept_files == 2
        assert entry_files(tmp_path) == [file]
        assert same(get(store, chunk(1)), chunk(1))


def test_after_the_clock_jumped_back_orphans_are_swept_and_entries_stay(tmp_path: Path) -> None:
    """Files written before the jump seem to come from the future."""
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
    (file,) = entry_files(tmp_path)
    stray = file.with_name(f"{'0' * 32}.00000000.safetensors")
    abandoned = file.with_name(f"{file.name}.tmp-{2**22 + 1}-00")
    for path in (stray, abandoned):
        path.write_bytes(b"half")
    to_come = time.time() + 365 * 86400.0
    for path in (file, stray, abandoned, tmp_path / ".swept"):
        os.utime(path, (to_come, to_come))
    with ChunkStore(tmp_path) as store:  # the last sweep seems to be in the future, so another one is due
        assert list(file.parent.iterdir()) == [file]
        assert same(get(store, chunk(1)), chunk(1))


def test_opening_sweeps_from_time_to_time(tmp_path: Path) -> None:
    stray = tmp_path / "ab" / f"{'ab' * 16}.00000000.safetensors"
    stray.parent.mkdir()
    stray.touch()
    os.utime(stray, (0, 0))
    ChunkStore(tmp_path).close()
    assert stray.exists()  # there was no catalogue yet that could have listed it
    ChunkStore(tmp_path).close()
    assert stray.exists()  # creating the store counted as a sweep
    os.utime(tmp_path / ".swept", (0, 0))
    ChunkStore(tmp_path).close()
    assert not stray.exists()


def test_a_shared_database_is_left_open(tmp_path: Path) -> None:
    database = Database(tmp_path / "kb.sqlite")
    with ChunkStore(tmp_path / "kv", database=database) as store:
        put(store, chunk(1))
    assert database.query("SELECT COUNT(*) FROM entries") == [(1,)]
    assert not (tmp_path / "kv" / "catalog.sqlite").exists()
    database.close()


def test_a_folder_that_cannot_be_used_and_a_limit_that_cannot_be_held(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ChunkStore(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="must be between"):
        ChunkStore(tmp_path / "store", limit_bytes=-1)
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="not a readable catalogue"):
        ChunkStore(tmp_path)
    with pytest.raises(StoreError, match="cannot be used"):
        Database(tmp_path / "file" / "sub" / "catalog.sqlite")
    (tmp_path / "folder" / "catalog.sqlite").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be read or written"):
        ChunkStore(tmp_path / "folder")
