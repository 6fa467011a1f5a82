"""Promotion and demotion between device, host and disk, prefetching, and entries in use."""

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.types import ChunkKV, KVProvenance
from support.store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    entry_files,
    eventually,
    feature,
    get,
    get_feature,
    key_of,
    listed,
    put,
    put_feature,
    same,
    same_feature,
)

WITHIN_S = 60.0


def digest(kv: ChunkKV, provenance: KVProvenance = ISOLATED) -> tuple[str, list[KVProvenance]]:
    return digest_tokens(kv.token_ids), [provenance]


def hosted(store: ChunkStore) -> int:
    return store.stats().by_tier["host"].entries


# Promotion and demotion


def test_retrieved_entries_are_promoted_to_memory_and_served_from_there(tmp_path: Path) -> None:
    kv, about = chunk(1), feature(2)
    with ChunkStore(tmp_path, host_bytes=10**6) as store:
        put(store, kv)
        put_feature(store, about)
        assert hosted(store) == 0  # not retrieved yet
        assert same(get(store, kv), kv)
        assert same_feature(get_feature(store, about), about)
        assert eventually(lambda: hosted(store) == 2)
        shutil.rmtree(entry_files(tmp_path)[0].parent)  # the disk is not needed for entries in memory
        for file in entry_files(tmp_path):
            file.unlink()
        store.tiers.disk.files.forget()
        assert same(get(store, kv), kv)
        assert same_feature(get_feature(store, about), about)
        by_tier = store.stats().by_tier
        assert (by_tier["host"].hits, by_tier["disk"].hits) == (2, 2)
        assert store.stats().hits == 4


def test_the_host_tier_is_off_by_default(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        get(store, chunk(1))
        store.tiers.close()
        assert hosted(store) == 0


def test_the_more_used_entry_replaces_the_less_used_one_in_memory_and_never_the_reverse(
    tmp_path: Path,
) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in (1, 2):
            put(store, chunk(seed))
        size = store.used_bytes // 2
        for _ in range(5):
            get(store, chunk(1))
        store.stats()  # writes the counts
        store.set_limit(size + 10, "host")
        get(store, chunk(1))
        assert eventually(lambda: hosted(store) == 1)
        get(store, chunk(2))
        store.tiers.reads.close()  # waits for background work
        host = store.tiers.host
        assert host.peek(key_of(store, digest(chunk(1))[0], ISOLATED).digest) is not None
        assert store.stats().by_tier["host"].bytes == size


def test_the_cap_in_memory_holds_and_can_be_lowered(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(6):
            put(store, chunk(seed))
        size = store.used_bytes // 6
        store.set_limit(3 * size, "host")
        for seed in range(6):
            get(store, chunk(seed))
            assert store.stats().by_tier["host"].bytes <= 3 * size
        assert eventually(lambda: hosted(store) == 3)
        store.set_limit(size, "host")
        assert hosted(store) == 1
        assert store.clear("host") == 1
        # An entry that was retrieved above may be on its way still.
        assert eventually(lambda: not store.clear("host"))
        assert hosted(store) == 0
    with ChunkStore(tmp_path) as store:
        assert store.stats().by_tier["host"].limit_bytes == size  # the cap is stored


def test_removed_entries_are_not_served_from_memory(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, host_bytes=10**6) as store, ChunkStore(tmp_path) as other:
        for seed in (1, 2):
            put(store, chunk(seed))
            get(store, chunk(seed))
        assert eventually(lambda: hosted(store) == 2)
        store.own("document", [digest(chunk(1))[0]])
        store.disown("document")
        assert get(store, chunk(1)) is None
        assert hosted(store) == 1
        other.clear()  # another process: the copy in memory here does not count
        assert get(store, chunk(2)) is None


@pytest.mark.parametrize("drop", ["disown", "clear"])
def test_an_entry_dropped_by_another_process_is_not_restored_from_memory(tmp_path: Path, drop: str) -> None:
    with ChunkStore(tmp_path, host_bytes=10**6) as store, ChunkStore(tmp_path) as other:
        put(store, chunk(1))
        get(store, chunk(1))
        assert eventually(lambda: hosted(store) == 1)
        if drop == "clear":
            other.clear()
        else:
            other.own("document", [digest(chunk(1))[0]])
            other.disown("document")
        store.set_limit(0, "host")
        assert listed(store, chunk(1)) == [False]
        assert get(store, chunk(1)) is None


def test_a_damaged_file_is_not_copied_into_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ChunkStore(tmp_path, host_bytes=10**6) as store:
        put(store, chunk(1))
        (file,) = entry_files(tmp_path)
        altered = bytearray(file.read_bytes())
        altered[-3] ^= 16
        file.write_bytes(altered)
        with caplog.at_level(logging.DEBUG, "kvweave"):
            found = store.find(MODEL, [(chunk(1).token_ids, [ISOLATED])])[0]
            assert found is not None  # its layers are verified when they are used
            store.tiers.reads.close()
        assert hosted(store) == 0
        assert "not kept in memory" in caplog.text


def test_kv_on_a_device_is_served_first_and_capped(tmp_path: Path) -> None:
    """The device is the CPU here, which makes no difference to eviction."""
    with ChunkStore(tmp_path) as store:
        for seed in range(3):
            put(store, chunk(seed))
        size = chunk(0).bytes
        tiers = store.tiers
        tiers.attach(DeviceTier(torch.device("cpu"), 2 * size, store.pins.in_use))
        for seed in range(3):
            assert same(get(store, chunk(seed)), chunk(seed))
        assert eventually(lambda: store.stats().by_tier["device"].entries == 2)
        assert store.stats().by_tier["device"].bytes == 2 * size
        held = tiers.device.sizes() if tiers.device is not None else {}
        for seed in range(3):
            if key_of(store, digest(chunk(seed))[0], ISOLATED).digest in held:
                assert same(get(store, chunk(seed)), chunk(seed))
        assert store.stats().by_tier["device"].hits == 2
        assert store.clear("device") == 2


def test_a_cpu_is_not_attached_as_a_device(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        store.attach_device(torch.device("cpu"), 10**6)
        assert store.tiers.device is None


def test_a_device_without_a_cap_is_used_once_it_has_one(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        store.attach_device(torch.device("meta"))  # any device but the CPU
        get(store, chunk(1))
        store.set_limit(10**6, "device")
        assert store.stats().by_tier["device"].entries == 0
        get(store, chunk(1))
        assert eventually(lambda: store.stats().by_tier["device"].entries == 1)
        store.set_limit(0, "device")
        assert store.stats().by_tier["device"].entries == 0


# Prefetching


def test_a_prefetched_file_is_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with ChunkStore(tmp_path) as store:
        put(store, kv)
        store.forget_recent()
        with store.lease() as lease:
            store.prefetch(MODEL, [digest(kv), digest(chunk(2))], lease)
            files = store.tiers.disk.files
            path = entry_files(tmp_path)[0].relative_to(tmp_path).as_posix()
            assert eventually(lambda: files.recent(path) is not None)
            monkeypatch.setattr(files, "open", None)  # the file is not opened again
            found = store.find(MODEL, [(kv.token_ids, [ISOLATED])], lease)[0]
            assert found is not None
            assert same(found[0], kv)
        assert (store.stats().hits, store.stats().misses) == (1, 0)
        assert store.tiers.reads.pending == 0


def test_unused_prefetches_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, begun = threading.Event(), threading.Event()
    opened: list[str] = []
    with ChunkStore(tmp_path) as store:
        for seed in range(12):
            put(store, chunk(seed))
        store.forget_recent()

        def slow(name: str, *_: object) -> None:
            opened.append(name)
            begun.set()
            assert go_on.wait(WITHIN_S)
            raise OSError("not read after all")

        monkeypatch.setattr(store.tiers.disk.files, "open", slow)

        def fail() -> None:
            with store.lease() as lease:
                store.prefetch(MODEL, [digest(chunk(seed)) for seed in range(12)], lease)
                assert begun.wait(WITHIN_S)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        go_on.set()
        assert eventually(lambda: store.tiers.reads.pending == 0)
        assert len(opened) < 12
        assert store.pins.in_use() == frozenset()


def test_damage_found_by_a_prefetch_is_reported_by_the_look_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        (file,) = entry_files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1])
        store.forget_recent()
        with store.lease() as lease, caplog.at_level(logging.WARNING, "kvweave"):
            store.prefetch(MODEL, [digest(chunk(1))], lease)
            assert store.find(MODEL, [(chunk(1).token_ids, [ISOLATED])], lease) == [None]
        assert store.stats().damaged == 1
        assert caplog.text.count("stored entry dropped") == 1


def test_prefetch_loads_the_first_provenance_that_is_stored(tmp_path: Path) -> None:
    kv = chunk(1)
    best, good = (KVProvenance("observed", (SYSTEM, digit * 32)) for digit in "78")
    with ChunkStore(tmp_path) as store:
        put(store, kv, good)
        with store.lease() as lease:
            store.prefetch(MODEL, [(digest_tokens(kv.token_ids), [best, good])], lease)
            assert store.pins.in_use() == {key_of(store, digest_tokens(kv.token_ids), good).digest}


# Entries in use


def test_entries_in_use_are_not_evicted_until_the_request_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(0))
        size = store.used_bytes
        store.set_limit(2 * size + size // 2)
        put(store, chunk(1))
        for _ in range(3):
            get(store, chunk(1))  # so that the other one would be evicted first
        with store.lease() as lease:
            store.find(MODEL, [(chunk(0).token_ids, [ISOLATED])], lease)
            assert put(store, chunk(2))
            assert listed(store, chunk(0), chunk(1), chunk(2)) == [True, False, True]
            with store.lease() as another:
                store.find(MODEL, [(chunk(2).token_ids, [ISOLATED])], another)
                with caplog.at_level(logging.WARNING, "kvweave"):
                    assert not put(store, chunk(3))  # every entry is in use
                assert "running requests use" in caplog.text
                assert "full" not in caplog.text  # the disk is not
                store.set_limit(size)
                assert store.used_bytes == 2 * size
            assert put(store, chunk(3)) is False
        assert put(store, chunk(3))
        assert listed(store, chunk(0), chunk(2), chunk(3)) == [False, False, True]
        assert store.used_bytes == size


def test_a_request_without_a_lease_pins_nothing(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(0))
        store.find(MODEL, [(chunk(0).token_ids, [ISOLATED])])
        get(store, chunk(0))
        assert store.pins.in_use() == frozenset()
