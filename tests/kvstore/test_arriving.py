"""Large KV of the shared tier, which is used while it is still coming."""

import gc
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from arriving_samples import (
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
from memory_tier import MemoryTier
from store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    entry_files,
    eventually,
    feature,
    get,
    get_note,
    listed,
    put_feature,
    same,
)

from kvweave.errors import DamagedEntry
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.loading import THREADS
from kvweave.kvstore.tiers.tiered import Asked, Got
from kvweave.types import KVProvenance

# What is asked for


def test_what_is_small_or_no_kv_comes_whole_in_one_request_and_what_is_absent_costs_one_too(
    tmp_path: Path, tier: MemoryTier
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
        assert get_note(store, large) is not None
        assert tier.calls == ["get_ranges", "get_ranges", "get_many"]
        assert get(store, chunk(8)) is None  # all of it is wanted, which is said at once
        assert tier.calls == ["get_ranges", "get_ranges", "get_many", "get_many"]


# While it comes


@pytest.mark.parametrize("name", KINDS)
def test_first_layers_are_used_while_the_others_are_held_back_and_then_all_is_as_it_was_stored(
    name: str, tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    kv, provenance = KINDS[name]
    with another(tmp_path, tier, kv, provenance) as store, store.lease() as lease:
        found = present(find(store, lease, kv, provenance))
        if name != "with queries":  # which lie behind all KV
            assert torch.equal(found.layer(0), kv.layer(0))
        assert eventually(lambda: len(slowly.held_back) > 0)
        assert listed(store, kv) == [False]
        slowly.go_on.set()
        assert same(found, kv)
        assert eventually(lambda: len(entry_files(store.folder)) == 1)
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data
        assert len(slowly.asked) == len(set(slowly.asked))  # nothing came twice
    assert "get_many" not in tier.calls


def test_who_asks_for_a_layer_waits_for_that_layer_only(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        assert eventually(lambda: len(slowly.held_back) > 0)  # the background is at the second piece
        (size,) = map(len, tier.held.values())
        slowly.lets = lambda ranges: ranges[-1][1] == size
        assert torch.equal(found.layer(LAST), KV.layer(LAST))
        asking = threading.Thread(target=lambda: found.layer(4))
        asking.start()
        asking.join(0.05)
        assert asking.is_alive()  # that layer is what the background waits for
        slowly.go_on.set()
        asking.join(WITHIN_S)
        assert not asking.is_alive()


def test_requests_for_the_same_entry_share_what_comes(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        with store.lease() as one, store.lease() as other, store.lease() as ahead:
            store.prefetch(MODEL, [(digest_tokens(KV.token_ids), [ISOLATED])], ahead)
            first, second = present(find(store, one)), present(find(store, other))
            slowly.go_on.set()
            assert same(first, KV)
            assert same(second, KV)
        assert len(slowly.asked) == len(set(slowly.asked))


def test_what_no_request_wants_any_more_stops_between_two_pieces_and_what_was_found_stays_valid(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        with store.lease() as lease:
            found = present(find(store, lease))
            assert eventually(lambda: len(slowly.held_back) == 1)
        slowly.go_on.set()
        fetches = store._parts.tiers._fetches
        assert fetches is not None
        assert eventually(lambda: not fetches._arriving)
        assert len(slowly.asked) == 2
        assert fetches._loader.under_way == 0
        assert same(found, KV)
        assert listed(store, KV) == [False]
        with store.lease() as lease:
            assert same(find(store, lease), KV)
            assert eventually(lambda: listed(store, KV) == [True])


def test_what_one_request_lets_go_of_comes_on_for_another(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as other:
        with store.lease() as lease:
            find(store, lease)
            find(store, other)
        slowly.go_on.set()
        assert eventually(lambda: listed(store, KV) == [True])


def test_what_one_request_missed_another_finds_while_that_one_lasts(tmp_path: Path, tier: MemoryTier) -> None:
    other = chunk(2, TOKENS, layers=LAYERS)
    with another(tmp_path, tier) as store, store.lease() as early, store.lease() as late:
        assert find(store, early, other) is None
        published(tmp_path, other)
        assert same(find(store, late, other), other)


def test_nobody_waits_for_what_another_request_loads(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
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


def test_without_a_lease_all_is_there_at_once(tmp_path: Path, tier: MemoryTier) -> None:
    with another(tmp_path, tier) as store:
        assert same(get(store, KV), KV)
    with another(tmp_path, tier, chunk(2, TOKENS, layers=LAYERS)) as store:
        (found,) = store.find(MODEL, [(chunk(2, TOKENS).token_ids, [ISOLATED])])
        tier.held.clear()
        assert found is not None
        assert same(found[0], chunk(2, TOKENS, layers=LAYERS))
        assert tier.calls.count("get_many") == 1


@pytest.mark.parametrize("ends", ["whole", "unwanted", "broken off"])
def test_what_nobody_holds_any_more_is_gone_at_once(
    ends: str, tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        fetches = store._parts.tiers._fetches
        assert fetches is not None
        with store.lease() as lease:
            found = present(find(store, lease))
            assert eventually(lambda: len(slowly.held_back) > 0)
            if ends == "broken off":
                tier.held.clear()
            if ends != "unwanted":
                slowly.go_on.set()
                with suppress(DamagedEntry):
                    assert same(found, KV)
                assert eventually(lambda: not fetches._arriving)
        slowly.go_on.set()
        assert eventually(lambda: not fetches._arriving)
        held = weakref.ref(found.held)
        gc.disable()
        try:
            del found
            assert eventually(lambda: held() is None, within_s=5.0)
        finally:
            gc.enable()


def test_a_layer_is_awaited_for_as_long_as_others_took_until_all_are_there(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        assert found.awaited_s > 0.0
        slowly.go_on.set()
        assert same(found, KV)
        assert found.awaited_s == 0.0


def test_two_spans_of_one_entry_find_it_by_different_provenances(tmp_path: Path, tier: MemoryTier) -> None:
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


# Adopting, and closing


def test_adopting_what_a_request_has_begun_brings_all_of_it_though_that_request_ends(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    adopted: list[list[bool]] = []
    with another(tmp_path, tier) as store:
        with store.lease() as lease:
            find(store, lease)
            assert eventually(lambda: len(slowly.held_back) > 0)
            adopting = threading.Thread(
                target=lambda: adopted.append(store.import_entries(MODEL, [(KV.token_ids, ISOLATED)]))
            )
            adopting.start()
            adopting.join(0.2)  # it waits for the piece that is held back
            assert adopting.is_alive()
        slowly.go_on.set()
        adopting.join(WITHIN_S)
        assert adopted == [[True]]
        # The background may have written it at the same moment, and takes its own copy back.
        assert eventually(lambda: len(entry_files(store.folder)) == 1)
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data


def test_what_is_adopted_is_what_was_verified_and_not_what_another_request_has_begun_since(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another(tmp_path, tier) as store, store.lease() as late:
        tiers = store._parts.tiers
        fetches, find_all = tiers._fetches, tiers.find
        assert fetches is not None
        monkeypatch.setattr(fetches, "_keep", lambda fetched: None)

        def find_and_begin_again(asked: Sequence[Asked], lease: Lease | None) -> list[Got | None]:
            found = find_all(asked, lease)
            assert eventually(lambda: not fetches._arriving)
            find_all(asked, late)
            assert [entry.fetched.whole for entry in fetches._arriving.values()] == [False]
            return found

        monkeypatch.setattr(tiers, "find", find_and_begin_again)
        assert store.import_entries(MODEL, [(KV.token_ids, ISOLATED)]) == [True]
        (file,), (data,) = entry_files(store.folder), tier.held.values()
        assert file.read_bytes() == data
        slowly.go_on.set()


def test_closing_waits_for_what_is_being_read_and_for_nothing_more(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
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
