import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.types import ChunkFeature, KVProvenance
from support.store_samples import (
    DIGEST,
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    entry_files,
    feature,
    fingerprint,
    get,
    get_feature,
    put,
    put_feature,
    same,
    same_feature,
    statements,
)


def test_a_stored_feature_is_found_in_this_process_and_the_next(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        assert get_feature(store, feature(1)) is None
        assert put_feature(store, feature(1))
        assert same_feature(get_feature(store, feature(1)), feature(1))
    with ChunkStore(tmp_path) as store:
        found = get_feature(store, feature(1))
        assert same_feature(found, feature(1))
        assert get_feature(store, feature(1)) is found  # and is not read again
        assert found is not None
        with pytest.raises(TypeError):
            found.tensors["kept"] = torch.zeros(1)  # type: ignore[index]  # other callers hold the same feature


@pytest.mark.parametrize("provenance", [DIGEST, ISOLATED], ids=["tainted", "exact"])
def test_a_feature_and_kv_of_one_provenance_are_separate_entries(
    tmp_path: Path, provenance: KVProvenance
) -> None:
    kv, one = chunk(1), feature(1)
    with ChunkStore(tmp_path) as store:
        put_feature(store, one, provenance)
        assert get(store, kv, provenance) is None
        assert store.has_many(MODEL, [(digest_tokens(kv.token_ids), provenance)]) == [False]
        assert store.versions(MODEL, [kv.token_ids]) == [[]]
        put(store, kv, provenance)
        assert same(get(store, kv, provenance), kv)
        assert same_feature(get_feature(store, one, provenance), one)
        assert store.stats().entries == 2
    with ChunkStore(tmp_path / "other") as store:
        put(store, kv, provenance)
        assert get_feature(store, one, provenance) is None


def test_a_feature_is_found_only_by_its_own_provenance(tmp_path: Path) -> None:
    one = feature(1)
    with ChunkStore(tmp_path) as store, ChunkStore(tmp_path, namespace="other") as other:
        put_feature(store, one)
        assert get_feature(other, one) is None
        assert store.find_features(fingerprint("b" * 32), [(one.token_ids, DIGEST)]) == [None]
        for provenance in (
            replace(DIGEST, kind="digest-15"),
            replace(DIGEST, context=()),
            replace(DIGEST, exact=True),
            replace(DIGEST, rope_regime="long"),
        ):
            assert get_feature(store, one, provenance) is None
            assert put_feature(store, one, provenance)
        assert store.stats().entries == 5


def test_many_are_found_by_one_query_in_the_order_asked_for(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        for seed in range(4):
            put_feature(store, feature(seed))
        order = (2, 9, 0, 3)
        with statements(store.database) as sent:
            found = store.find_features(MODEL, [(feature(seed).token_ids, DIGEST) for seed in order])
        assert len(sent) == 1
        assert found[1] is None
        assert all(same_feature(one, feature(i)) for one, i in zip(found, order, strict=True) if i != 9)
        assert store.find_features(MODEL, []) == []
        assert (store.stats().hits, store.stats().misses) == (3, 1)


def test_a_damaged_feature_is_a_counted_logged_miss_and_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore(tmp_path) as store:
        put_feature(store, feature(1))
        put(store, chunk(1))
        (file,) = (file for file in entry_files(tmp_path) if b'"moved"' in file.read_bytes())
        altered = bytearray(file.read_bytes())
        altered[-1] ^= 1  # uint8 is the narrowest and comes last
        file.write_bytes(altered)
        with caplog.at_level(logging.WARNING, "kvweave"):
            assert get_feature(store, feature(1)) is None
        assert "altered in mask" in caplog.text
        stats = store.stats()
        assert (stats.damaged, stats.misses, stats.entries) == (1, 1, 1)
        assert put_feature(store, feature(1))
        assert same_feature(get_feature(store, feature(1)), feature(1))


def test_features_and_kv_share_the_cap_and_the_order_of_eviction(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        put_feature(store, feature(1))
        put_feature(store, feature(2))
        for seed, times in ((1, 2), (2, 1)):
            for _ in range(times):
                get_feature(store, feature(seed))
        largest = max(file.stat().st_size for file in entry_files(tmp_path))
        used = store.used_bytes
        store.set_limit(used - 1)
        assert get(store, chunk(1)) is None  # never retrieved
        store.set_limit(store.used_bytes + 10)
        assert put_feature(store, feature(3))
        found = [get_feature(store, feature(seed)) is not None for seed in (1, 2, 3)]
        assert found == [True, False, True]
        assert sum(file.stat().st_size for file in entry_files(tmp_path)) == store.used_bytes <= used
        assert store.stats().evicted == 2
        assert not put_feature(store, ChunkFeature((1,), {"large": torch.zeros(used + largest)}))


def test_a_feature_is_dropped_with_the_last_owner_of_any_of_its_chunks(tmp_path: Path) -> None:
    a, b = (digest_tokens(feature(seed).token_ids) for seed in (1, 2))
    after_a = KVProvenance("attention", (SYSTEM, a), exact=False)
    with ChunkStore(tmp_path, owned_only=True) as store:
        assert not put_feature(store, feature(1))
        store.own("one", [a])
        store.own("two", [b])
        put_feature(store, feature(1))
        put_feature(store, feature(2))
        put_feature(store, feature(2), after_a, a)
        get_feature(store, feature(1))
        assert store.disown("one") == 2
        assert get_feature(store, feature(1)) is None
        assert get_feature(store, feature(2), after_a) is None
        assert same_feature(get_feature(store, feature(2)), feature(2))
        assert len(entry_files(tmp_path)) == 1


def test_whether_features_are_listed_takes_one_query_and_reads_no_file(tmp_path: Path) -> None:
    wanted = [(digest_tokens(feature(seed).token_ids), DIGEST) for seed in (1, 2)]
    with ChunkStore(tmp_path) as store:
        put_feature(store, feature(1))
        put(store, chunk(2), DIGEST)  # KV is no feature
        with statements(store.database) as sent:
            assert store.has_many(MODEL, wanted, "note") == [True, False]
        assert len(sent) == 1
        assert (store.stats().hits, store.stats().misses) == (0, 0)


def test_stats_and_verify_include_features(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, chunk(1))
        put_feature(store, feature(1))
        put_feature(store, feature(2, tokens=7))
        kinds = {kind: (total.entries, total.tokens) for kind, total in store.stats().by_kind.items()}
        assert kinds == {"digest-12": (2, 12), "isolated": (1, 5)}
        assert store.stats().bytes == sum(file.stat().st_size for file in entry_files(tmp_path))
        report = store.verify()
        assert report.sound
        assert report.checked == 3
        for file in entry_files(tmp_path):
            file.write_bytes(file.read_bytes()[:-1])
        assert len(store.verify().damaged) == 3
        assert store.stats().entries == 0


def test_an_invalid_feature_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        with pytest.raises(InvalidRequest, match="'Digest' does not name a kind"):
            put_feature(store, feature(1), replace(DIGEST, kind="Digest"))
        with pytest.raises(InvalidRequest, match="named 'kv'"):
            put_feature(store, ChunkFeature((1,), {"kv": torch.zeros(1)}))
        assert store.stats().entries == len(entry_files(tmp_path)) == 0
