from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.errors import InvalidRequest, StoreError
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
    fingerprint,
    get,
    put,
    put_feature,
    same,
    statements,
)

KV = chunk(1)
PATHS = [KVProvenance("observed", (SYSTEM, str(number) * 32)) for number in range(5)]


def capped(store: ChunkStore, provenance: KVProvenance, most: int) -> bool:
    return store.put(MODEL, KV, provenance, [digest_tokens(KV.token_ids)], max_versions=most)


def test_all_versions_of_several_chunks_are_listed_by_one_query(tmp_path: Path) -> None:
    made = [
        ISOLATED,
        KVProvenance("similar-10", (SYSTEM,), exact=False),
        KVProvenance("following-1", (SYSTEM,), exact=False),
        KVProvenance("observed", (SYSTEM, "7" * 32, 'ü"')),
        KVProvenance("observed", (SYSTEM, "7" * 32, 'ü"'), exact=False),
        KVProvenance("observed", (SYSTEM, "7" * 32, 'ü"'), rope_regime="long"),
    ]
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path, namespace="other") as other:
        assert all(put(store, KV, provenance) for provenance in made)
        put(store, chunk(2), PATHS[0])
        put(other, KV, PATHS[1])
        store.put(fingerprint("b" * 32), KV, PATHS[2], [])
        put_feature(store, feature(1))
        with statements(store.database) as sent:
            asked = [chunk(2).token_ids, chunk(3).token_ids, KV.token_ids]
            second, absent, first = store.versions(MODEL, asked)
        assert len(sent) == 1
        assert (second, absent) == ([PATHS[0]], [])
        assert set(first) == set(made)
        assert len(first) == len(made)
        assert store.versions(MODEL, []) == []
        assert (store.stats().hits, store.stats().misses) == (0, 0)
        for provenance in first:
            assert same(get(store, KV, provenance), KV)


def test_the_kind_distinguishes_inexact_kv_of_one_context(tmp_path: Path) -> None:
    similar, following = (
        KVProvenance(kind, (SYSTEM,), exact=False) for kind in ("similar-10", "following-1")
    )
    with ChunkStore(tmp_path) as store:
        put(store, KV, similar)
        assert get(store, KV, following) is None
        assert get(store, KV) is None
        found = store.find(MODEL, [(KV.token_ids, [following, similar])])[0]
        assert found is not None
        assert found[1] is similar


def test_the_most_used_version_comes_first(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for provenance, times in zip(PATHS, (1, 4, 0, 3, 2), strict=True):
            put(store, KV, provenance)
            for _ in range(times):
                get(store, KV, provenance)
        store.stats()  # writes the counts
        assert store.versions(MODEL, [KV.token_ids]) == [[PATHS[i] for i in (1, 3, 4, 0, 2)]]


def test_beyond_max_versions_the_least_used_version_is_dropped_and_never_the_new_one(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for provenance, times in zip(PATHS[:3], (2, 1, 3), strict=True):
            assert capped(store, provenance, 3)
            for _ in range(times):
                get(store, KV, provenance)
        assert capped(store, PATHS[3], 3)  # the uses of this process count though they are not written yet
        assert set(store.versions(MODEL, [KV.token_ids])[0]) == {PATHS[0], PATHS[2], PATHS[3]}
        assert capped(store, PATHS[4], 1)
        assert store.versions(MODEL, [KV.token_ids]) == [[PATHS[4]]]
        assert get(store, KV, PATHS[3]) is None
        assert same(get(store, KV, PATHS[4]), KV)
        assert store.stats().evicted == 4
        assert store.stats().entries == len(entry_files(tmp_path)) == 1


def test_a_version_that_a_request_uses_is_not_dropped_as_surplus(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store, store.lease() as lease:
        for provenance, times in zip(PATHS[:3], (1, 2, 3), strict=True):
            assert capped(store, provenance, 3)
            for _ in range(times):
                get(store, KV, provenance)
        store.prefetch(MODEL, [(digest_tokens(KV.token_ids), [PATHS[0]])], lease)  # the least used one
        assert capped(store, PATHS[3], 3)
        assert set(store.versions(MODEL, [KV.token_ids])[0]) == {PATHS[0], PATHS[2], PATHS[3]}
        assert capped(store, PATHS[4], 1)
        assert set(store.versions(MODEL, [KV.token_ids])[0]) == {PATHS[0], PATHS[4]}
        assert store.stats().evicted == 3


def test_only_versions_of_the_same_chunk_and_kind_are_counted(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path, namespace="other") as other:
        put(store, KV)
        put(store, KV, KVProvenance("similar-10", (SYSTEM,), exact=False))
        put(store, chunk(2), PATHS[0])
        put(other, KV, PATHS[0])
        store.put(fingerprint("b" * 32), KV, PATHS[0], [])
        put_feature(store, feature(1), PATHS[0])
        assert capped(store, PATHS[0], 1)
        assert capped(store, PATHS[0], 1)  # stored already
        assert store.stats().evicted == 0
        assert capped(store, PATHS[1], 1)
        assert store.stats().evicted == 1
        assert store.stats().entries == 7


def test_versions_are_dropped_in_the_transaction_that_lists_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[str]:
        raise RuntimeError("interrupted")

    with ChunkStore(tmp_path) as store:
        capped(store, PATHS[0], 1)
        with monkeypatch.context() as patch:
            patch.setattr(store.capacity, "make_room", fail)  # the last step before the commit
            with pytest.raises(RuntimeError, match="interrupted"):
                capped(store, PATHS[1], 1)
        assert store.versions(MODEL, [KV.token_ids]) == [[PATHS[0]]]
        assert same(get(store, KV, PATHS[0]), KV)
        assert len(entry_files(tmp_path)) == 1


def test_less_than_one_version_is_refused(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        with pytest.raises(InvalidRequest, match="max_versions is 0"):
            capped(store, PATHS[0], 0)
        assert store.stats().entries == 0


def test_a_catalogue_that_lacks_a_column_is_refused_when_opened(tmp_path: Path) -> None:
    database = Database(tmp_path / "catalog.sqlite")
    columns = "namespace, kind, exact, tokens, bytes, path, model, model_name, made_at, last_used, uses"
    database.script([f"CREATE TABLE entries (id INTEGER PRIMARY KEY, key TEXT UNIQUE, {columns})"])
    database.close()
    with pytest.raises(StoreError, match=r"catalog.sqlite is not a readable catalogue .* move it away"):
        ChunkStore(tmp_path)
