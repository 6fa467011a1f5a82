"""The catalogue is deleted while the files are there."""

import logging
import os
import time
from pathlib import Path

import pytest

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.types import KVProvenance
from support.store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    entry_files,
    feature,
    get,
    get_feature,
    listed,
    put,
    put_feature,
    same,
    same_feature,
)


def lose_catalog(folder: Path, age_s: float = 300.0) -> None:
    """Delete the catalogue, this long after the last file was written."""
    for file in folder.glob("catalog.sqlite*"):
        file.unlink()
    for file in entry_files(folder):
        os.utime(file, (time.time() - age_s,) * 2)


def test_a_lost_catalogue_is_rebuilt_from_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observed = KVProvenance("observed", (SYSTEM, "7" * 32))
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path, namespace="other") as other:
        put(store, chunk(1))
        put(store, chunk(1), observed, "7" * 32)
        put_feature(store, feature(2))
        put(other, chunk(3))
        before = store.stats().by_kind
        versions = store.versions(MODEL, [chunk(1).token_ids])
    lose_catalog(tmp_path)
    with caplog.at_level(logging.WARNING, "kvweave"), ChunkStore(tmp_path) as store:
        assert "4 entries are listed again" in caplog.text
        after = store.stats().by_kind
        assert {kind: totals.bytes for kind, totals in after.items()} == {
            kind: totals.bytes for kind, totals in before.items()
        }
        assert set(store.versions(MODEL, [chunk(1).token_ids])[0]) == set(versions[0])
        assert same(get(store, chunk(1), observed), chunk(1))
        assert same_feature(get_feature(store, feature(2)), feature(2))
        assert get(store, chunk(3)) is None
        store.own("document", ["7" * 32])
        assert store.disown("document") == 1  # their sources are known again
        assert store.verify().sound
    caplog.clear()
    ChunkStore(tmp_path).close()
    assert caplog.text == ""


def test_damaged_files_of_a_lost_catalogue_are_not_used_and_the_cap_holds(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(5):
            put(store, chunk(seed))
        size = store.used_bytes // 5
    cut, altered, *_ = entry_files(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(altered.read_bytes())
    data[-3] ^= 1
    altered.write_bytes(data)
    lose_catalog(tmp_path)
    with ChunkStore(tmp_path) as store:
        assert store.stats().entries == 4
        found = [get(store, chunk(seed)) for seed in range(5)]
        assert all(kv is None or same(kv, chunk(seed)) for seed, kv in enumerate(found))
        assert (found.count(None), store.stats().damaged) == (2, 1)
    lose_catalog(tmp_path)
    with ChunkStore(tmp_path, limit_bytes=2 * size) as store:
        assert store.stats().entries == 2
        assert store.used_bytes <= 2 * size


def test_a_young_file_is_left_to_its_writer(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
    lose_catalog(tmp_path, age_s=1.0)
    with ChunkStore(tmp_path) as store:
        assert listed(store, chunk(1)) == [False]
        assert len(entry_files(tmp_path)) == 1


def test_files_of_a_lost_catalogue_wait_for_their_documents_in_an_owned_only_store(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, owned_only=True) as store:
        store.own("document", [digest_tokens(chunk(seed).token_ids) for seed in (1, 2)])
        put(store, chunk(1))
        put(store, chunk(2))
    lose_catalog(tmp_path, age_s=3600.0)
    for _ in range(2):
        with ChunkStore(tmp_path, owned_only=True) as store:
            assert store.stats().entries == 0
            assert len(entry_files(tmp_path)) == 2
    with ChunkStore(tmp_path, owned_only=True) as store:
        store.own("document", [digest_tokens(chunk(1).token_ids)])
        wanted = [(chunk(seed).token_ids, ISOLATED) for seed in (1, 2, 3)]
        assert store.import_entries(MODEL, wanted) == [True, False, False]
        assert same(get(store, chunk(1)), chunk(1))
    os.utime(tmp_path / ".swept", (0, 0))
    with ChunkStore(tmp_path, owned_only=True) as store:
        assert len(entry_files(tmp_path)) == 1  # the document of the other one was not added again
        assert same(get(store, chunk(1)), chunk(1))
