"""Large KV of the shared tier, used while the rest is still being read."""

import gc
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kvweave.errors import DamagedEntry
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.loading import THREADS
from kvweave.kvstore.tiers.tiered import Found, LookUp
from kvweave.types import KVProvenance
from support.fake_remote_tier import FakeRemoteTier
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
    listed,
    put_feature,
    same,
)
from support.streaming_samples import (
    KINDS,
    KV,
    LAST,
    LAYERS,
    TOKENS,
    WITHIN_S,
    Slowly,
    another,
    find,
    present,
    published,
)

# Requests to the tier


def test_small_entries_features_and_misses_take_one_request_each(
    tmp_path: Path, tier: FakeRemoteTier
) -> None:
    large = feature(2, tokens=100_000)
    with another(tmp_path, tier, chunk(1)) as store:
        with ChunkStore(tmp_path / "first", shared="memory:") as first:
            put_feature(first, large)
        tier.calls.clear()
        with store.lease() as lease:
            assert same(find(store, lease, chunk(1)), chunk(1))
            assert tier.calls == ["get_ranges"]
            assert find(store, lease, chunk(9)) is None
            assert tier.calls == ["get_ranges"] * 2
        assert get_feature(store, large) is not None
        assert tier.calls == ["get_ranges", "get_ranges", "get_many"]
        assert get(store, chunk(8)) is None  # requested whole from the start
        assert tier.calls == ["get_ranges", "get_ranges", "get_many", "get_many"]


# While it streams


@pytest.mark.parametrize("name", KINDS)
def test_first_layers_are_usable_while_the_rest_streams_and_everything_is_stored_in_the_end(
    name: str, tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    kv, provenance = KINDS[name]
    with another(tmp_path, tier, kv, provenance) as store, store.lease() as lease:
        found = present(find(store, lease, kv, provenance))
        assert torch.equal(found.layer(0), kv.layer(0))
        assert eventually(lambda: len(slowly.held_back) > 0)
        assert listed(store, kv) == [False]
        slowly.go_on.set()
        assert same(found, kv)
        assert eventually(lambda: len(entry_files(store.folder)) == 1)
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data
        assert len(slowly.asked) == len(set(slowly.asked))  # nothing was read twice
    assert "get_many" not in tier.calls


def test_a_reader_of_a_layer_waits_for_that_layer_only(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        assert eventually(lambda: len(slowly.held_back) > 0)  # the background thread is at the second piece
        (size,) = map(len, tier.held.values())
        slowly.lets = lambda ranges: ranges[-1][1] == size
        assert torch.equal(found.layer(LAST), KV.layer(LAST))
        asking = threading.Thread(target=lambda: found.layer(4))
        asking.start()
        asking.join(0.05)
        assert asking.is_alive()  # that layer is in the piece that the background thread waits for
        slowly.go_on.set()
        asking.join(WITHIN_S)
        assert not asking.is_alive()


def test_requests_for_one_entry_share_its_stream(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        with store.lease() as one, store.lease() as other, store.lease() as ahead:
            store.prefetch(MODEL, [(digest_tokens(KV.token_ids), [ISOLATED])], ahead)
            first, second = present(find(store, one)), present(find(store, other))
            slowly.go_on.set()
            assert same(first, KV)
            assert same(second, KV)
        assert len(slowly.asked) == len(set(slowly.asked))


def test_streaming_stops_when_no_request_wants_the_entry_and_found_kv_stays_valid(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        with store.lease() as lease:
            found = present(find(store, lease))
            assert eventually(lambda: len(slowly.held_back) == 1)
        slowly.go_on.set()
        fetcher = store.tiers.fetcher
        assert fetcher is not None
        assert eventually(lambda: fetcher.pending == 0)
        assert len(slowly.asked) == 2
        assert fetcher.loader.pending == 0
        assert same(found, KV)
        assert listed(store, KV) == [False]
        with store.lease() as lease:
            assert same(find(store, lease), KV)
            assert eventually(lambda: listed(store, KV) == [True])


def test_streaming_continues_for_another_request(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as other:
        with store.lease() as lease:
            find(store, lease)
            find(store, other)
        slowly.go_on.set()
        assert eventually(lambda: listed(store, KV) == [True])


def test_a_miss_of_one_request_does_not_hide_an_entry_published_since(
    tmp_path: Path, tier: FakeRemoteTier
) -> None:
    other = chunk(2, TOKENS, layers=LAYERS)
    with another(tmp_path, tier) as store, store.lease() as early, store.lease() as late:
        assert find(store, early, other) is None
        published(tmp_path, other)
        assert same(find(store, late, other), other)


def test_a_request_does_not_wait_for_the_loads_of_another(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    others = [chunk(seed, TOKENS, layers=LAYERS) for seed in range(2, 8)]
    with another(tmp_path, tier) as store:
        published(tmp_path, *others)
        with store.lease() as slow, store.lease() as lease:
            for kv in others:
                find(store, slow, kv)
            assert eventually(lambda: len(slowly.held_back) >= 4)  # every thread is busy
            slowly.lets = lambda ranges: True
            assert same(find(store, lease), KV)
            assert not slowly.go_on.is_set()
            slowly.go_on.set()


def test_without_a_lease_all_layers_are_read_at_once(tmp_path: Path, tier: FakeRemoteTier) -> None:
    with another(tmp_path, tier) as store:
        assert same(get(store, KV), KV)
    with another(tmp_path, tier, chunk(2, TOKENS, layers=LAYERS)) as store:
        (found,) = store.find(MODEL, [(chunk(2, TOKENS).token_ids, [ISOLATED])])
        tier.held.clear()
        assert found is not None
        assert same(found[0], chunk(2, TOKENS, layers=LAYERS))
        assert tier.calls.count("get_many") == 1


@pytest.mark.parametrize("ends", ["whole", "unwanted", "aborted"])
def test_an_entry_without_references_is_freed_at_once(
    ends: str, tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        fetcher = store.tiers.fetcher
        assert fetcher is not None
        with store.lease() as lease:
            found = present(find(store, lease))
            assert eventually(lambda: len(slowly.held_back) > 0)
            if ends == "aborted":
                tier.held.clear()
            if ends != "unwanted":
                slowly.go_on.set()
                with suppress(DamagedEntry):
                    assert same(found, KV)
                assert eventually(lambda: fetcher.pending == 0)
        slowly.go_on.set()
        assert eventually(lambda: fetcher.pending == 0)
        held = weakref.ref(found.data)
        gc.disable()
        try:
            del found
            assert eventually(lambda: held() is None, within_s=5.0)
        finally:
            gc.enable()


def test_the_wait_for_a_layer_is_estimated_until_all_are_read(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        assert found.layer_wait_s > 0.0
        slowly.go_on.set()
        assert same(found, KV)
        assert found.layer_wait_s == 0.0


def test_two_spans_of_one_entry_find_it_by_different_provenances(
    tmp_path: Path, tier: FakeRemoteTier
) -> None:
    other = KVProvenance("observed", (SYSTEM, "7" * 32))
    wanted = [(KV.token_ids, [other, ISOLATED]), (KV.token_ids, [ISOLATED])]
    with another(tmp_path, tier) as store:
        with store.lease() as lease:
            for found in store.find(MODEL, wanted, lease):
                assert found is not None
                assert same(found[0], KV)
        assert eventually(lambda: listed(store, KV) == [True])
        tier.calls.clear()
        unknown = [(chunk(9).token_ids, [other, ISOLATED]), (chunk(9).token_ids, [ISOLATED])]
        with store.lease() as lease:
            assert store.find(MODEL, unknown, lease) == [None, None]
        assert tier.calls == ["get_ranges"] * 2


# Importing and closing


def test_an_import_completes_an_entry_although_the_request_that_began_it_ends(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    imported: list[list[bool]] = []
    with another(tmp_path, tier) as store:
        with store.lease() as lease:
            find(store, lease)
            assert eventually(lambda: len(slowly.held_back) > 0)
            importing = threading.Thread(
                target=lambda: imported.append(store.import_entries(MODEL, [(KV.token_ids, ISOLATED)]))
            )
            importing.start()
            importing.join(0.2)  # it waits for the piece that is held back
            assert importing.is_alive()
        slowly.go_on.set()
        importing.join(WITHIN_S)
        assert imported == [[True]]
        # The background thread may have written it at the same moment, and then deletes its own copy.
        assert eventually(lambda: len(entry_files(store.folder)) == 1)
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data


def test_an_import_stores_the_entry_it_verified_and_not_one_that_a_later_request_began(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another(tmp_path, tier) as store, store.lease() as late:
        tiers = store.tiers
        fetcher, find_all = tiers.fetcher, tiers.find
        assert fetcher is not None
        monkeypatch.setattr(fetcher, "store", lambda fetched: None)

        def find_and_begin_again(asked: Sequence[LookUp], lease: Lease | None) -> list[Found | None]:
            found = find_all(asked, lease)
            assert eventually(lambda: fetcher.pending == 0)
            find_all(asked, late)
            assert fetcher.pending == 1
            return found

        monkeypatch.setattr(tiers, "find", find_and_begin_again)
        assert store.import_entries(MODEL, [(KV.token_ids, ISOLATED)]) == [True]
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data
        slowly.go_on.set()


def test_closing_waits_for_active_reads_and_starts_no_more(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    others = [chunk(seed, TOKENS, layers=LAYERS) for seed in range(2, 10)]
    with another(tmp_path, tier) as store:
        published(tmp_path, *others)
        with store.lease() as lease:
            for kv in others:
                find(store, lease, kv)
            assert eventually(lambda: len(slowly.held_back) >= THREADS)
            closing = threading.Thread(target=store.close)
            closing.start()
            closing.join(0.1)
            asked = len(slowly.asked)
            slowly.go_on.set()
            closing.join(WITHIN_S)
            assert not closing.is_alive()
            assert len(slowly.asked) == asked
