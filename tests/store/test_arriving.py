"""Large KV of the shared tier, which is used while it is still coming."""

import gc
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from memory_tier import MemoryTier
from store_samples import (
    ISOLATED,
    MODEL,
    chunk,
    chunk_with_queries,
    entry_files,
    eventually,
    get,
    get_note,
    listed,
    note,
    put,
    put_note,
    quantised_chunk,
    same,
)

from kvweave.core import ChunkKV, Making
from kvweave.errors import DamagedEntry, TierUnavailable
from kvweave.store.chunk_store import ChunkStore
from kvweave.store.format import layer_places
from kvweave.store.keys import digest_tokens, quantised, with_queries
from kvweave.store.tiers.arriving import PIECE_BYTES, pieces
from kvweave.store.tiers.lease import Lease
from kvweave.store.tiers.link_pace import LinkPace
from kvweave.store.tiers.tier import Blob, Range, owned_copy

WITHIN_S = 60.0
LAYERS, TOKENS = 12, 10_000  # 320 kB for each layer
KV = chunk(1, tokens=TOKENS, layers=LAYERS)
LAST = LAYERS - 1
WIDE = torch.randn(16, 2, 1, 2500, 64)

KINDS: dict[str, tuple[ChunkKV, Making]] = {
    "exact": (KV, ISOLATED),
    "with queries": (chunk_with_queries(1, tokens=TOKENS, layers=LAYERS), with_queries(ISOLATED)),
    **{
        storage: (quantised_chunk(1, storage, 2500, WIDE), quantised(ISOLATED, storage))
        for storage in ("int8", "int4")
    },
}


class Slowly:
    """Lets parts of entries behind their beginning come only when `go_on` is set, or those that `lets` says."""

    def __init__(self, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.asked: list[Range] = []
        self.held_back: list[Range] = []
        self.lets = lambda ranges: False
        self._read = tier.get_ranges
        monkeypatch.setattr(tier, "get_ranges", self.get_ranges)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[Blob] | None:
        self.asked += ranges
        if ranges[0][0] and not self.lets(ranges):
            self.held_back += ranges
            assert self.go_on.wait(WITHIN_S)
        return self._read(key, ranges)


@pytest.fixture
def slowly(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowly]:
    slowly = Slowly(tier, monkeypatch)
    yield slowly
    slowly.go_on.set()


@contextmanager
def another(
    tmp_path: Path, tier: MemoryTier, kv: ChunkKV = KV, making: Making = ISOLATED
) -> Iterator[ChunkStore]:
    """The store of a machine, after another one has put this into the tier."""
    with ChunkStore(tmp_path / "first", shared="memory:") as first:
        put(first, kv, making)
    tier.calls.clear()
    with ChunkStore(tmp_path / "second", shared="memory:") as second:
        yield second


def find(store: ChunkStore, lease: Lease, kv: ChunkKV = KV, making: Making = ISOLATED) -> ChunkKV | None:
    (found,) = store.find(MODEL, [(kv.token_ids, [making])], lease)
    return None if found is None else found[0]


def present(found: ChunkKV | None) -> ChunkKV:
    assert found is not None
    return found


def alter(tier: MemoryTier, at: int) -> None:
    ((key, data),) = tier.held.items()
    tier.held[key] = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


# What is asked for


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("there", [0, 2000, 400_000, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_what_is_there_and_the_pieces_make_up_the_entry(
    name: str, there: int, tmp_path: Path, tier: MemoryTier
) -> None:
    with another(tmp_path, tier, *KINDS[name]):
        (data,) = tier.held.values()
    places = layer_places(owned_copy(data[:PIECE_BYTES]), "entry")
    assert places.bytes == len(data)
    there = max(there, places.first)
    made = pieces(places, there)
    parts = sorted((begin, end) for piece in made for begin, end in piece.ranges)
    edges = [(0, there), *parts]
    assert [begin for begin, _ in edges[1:]] == [end for _, end in edges[:-1]]
    assert edges[-1][1] == len(data)
    layers = [layer for piece in made for layer in piece.layers]
    assert layers == list(range(layers[0], len(places.layers)))
    assert all(end <= there for layer in places.layers[: layers[0]] for _, end in layer)
    sizes = [sum(end - begin for begin, end in piece.ranges) for piece in made]
    assert all(PIECE_BYTES <= size < 2 * PIECE_BYTES for size in sizes[:-1])


def test_what_is_small_or_no_kv_comes_whole_in_one_request_and_what_is_absent_costs_one_too(
    tmp_path: Path, tier: MemoryTier
) -> None:
    large = note(2, tokens=100_000)
    with another(tmp_path, tier, chunk(1)) as store:
        with ChunkStore(tmp_path / "first", shared="memory:") as first:
            put_note(first, large)
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
    kv, making = KINDS[name]
    with another(tmp_path, tier, kv, making) as store, store.lease() as lease:
        found = present(find(store, lease, kv, making))
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
        with ChunkStore(tmp_path / "first", shared="memory:") as first:
            put(first, other)
        assert same(find(store, late, other), other)


def test_nobody_waits_for_what_another_request_loads(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    others = [chunk(seed, TOKENS, layers=LAYERS) for seed in range(2, 8)]
    with another(tmp_path, tier) as store:
        with ChunkStore(tmp_path / "first", shared="memory:") as first:
            for kv in others:
                put(first, kv)
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


# What goes wrong in the middle


def broken_off(store: ChunkStore, tier: MemoryTier, slowly: Slowly, what_happens: object) -> None:
    """Find KV, let something happen, and be told of it when the last layer is asked for."""
    with store.lease() as lease:
        found = present(find(store, lease))
        assert torch.equal(found.layer(0), KV.layer(0))
        what_happens()  # type: ignore[operator]
        slowly.go_on.set()
        with pytest.raises(DamagedEntry):
            found.layer(LAST)
        with pytest.raises(DamagedEntry):
            found.kv  # noqa: B018


def test_a_server_that_dies_is_no_damage_and_whoever_starts_anew_finds_nothing_while_it_is_away(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        def away(call: str, keys: Sequence[str]) -> None:
            raise TierUnavailable("away")

        tier.before = away

    with another(tmp_path, tier) as store:
        broken_off(store, tier, slowly, die)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 0
        assert len(tier.held) == 1
        assert listed(store, KV) == [False]
        tier.before = lambda call, keys: None
        assert eventually(lambda: get(store, KV) is not None)


def test_a_server_that_fails_after_every_beginning_is_not_tried_for_ever(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tier.get_ranges
    monkeypatch.setattr(tier, "get_ranges", lambda key, ranges: None if ranges[0][0] else read(key, ranges))
    with another(tmp_path, tier) as store, store.lease() as lease:
        with pytest.raises(DamagedEntry, match="cannot be had"):
            present(find(store, lease)).layer(LAST)
        assert same(find(store, lease), KV)  # whole, since it did not work otherwise
        assert tier.calls == ["get_ranges", "get_many"]


@pytest.mark.parametrize("at", [-3, None])
def test_what_is_altered_or_cut_short_in_a_late_layer_is_dropped_there_counted_and_told(
    at: int | None, tmp_path: Path, tier: MemoryTier, slowly: Slowly, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        ((key, data),) = tier.held.items()
        if at is None:
            tier.held[key] = data[: len(data) // 2]
        else:
            alter(tier, len(data) + at)

    with another(tmp_path, tier) as store, caplog.at_level(logging.WARNING, "kvweave"):
        broken_off(store, tier, slowly, spoil)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 1
        assert tier.held == {}
        assert caplog.text.count("shared entry dropped") == 1
        assert listed(store, KV) == [False]
        assert entry_files(store.folder) == []


def test_what_is_altered_in_a_layer_that_nobody_asked_for_is_not_kept(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        fetches = store._parts.tiers._fetches
        assert fetches is not None
        with store.lease() as lease:
            found = present(find(store, lease))
            alter(tier, len(next(iter(tier.held.values()))) - 3)
            slowly.go_on.set()
            assert eventually(lambda: not fetches._arriving)
            assert torch.equal(found.layer(3), KV.layer(3))
        assert entry_files(store.folder) == []
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 1


def test_an_altered_beginning_is_found_at_once(tmp_path: Path, tier: MemoryTier) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        alter(tier, 100)
        assert find(store, lease) is None
        assert store.stats().damaged == 1
        assert tier.held == {}


def test_what_is_deleted_there_meanwhile_is_no_damage(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        broken_off(store, tier, slowly, tier.held.clear)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 0


def test_what_another_machine_replaced_meanwhile_is_no_damage_and_is_used_by_whoever_starts_anew(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    other = ChunkKV(KV.token_ids, KV.kv + 0.25)

    def replace() -> None:
        with ChunkStore(tmp_path / "third", shared="memory:") as third:
            tier.held.clear()
            put(third, other)

    with another(tmp_path, tier) as store:
        broken_off(store, tier, slowly, replace)
        with store.lease() as lease:
            assert same(find(store, lease), other)
        assert store.stats().damaged == 0
        assert len(tier.held) == 1
        assert eventually(lambda: listed(store, KV) == [True])
        store.forget_recent()
        assert same(get(store, KV), other)


def test_an_interrupt_while_a_piece_is_read_leaves_it_to_others(
    tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, interrupted = tier.get_ranges, threading.Event()
    (main,) = [threading.main_thread()]

    def get_ranges(key: str, ranges: Sequence[Range]) -> list[Blob] | None:
        if ranges[0][0] and threading.current_thread() is main and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        if ranges[0][0]:
            assert interrupted.wait(WITHIN_S)
        return read(key, ranges)

    monkeypatch.setattr(tier, "get_ranges", get_ranges)
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        with pytest.raises(KeyboardInterrupt):
            found.layer(LAST)
        assert same(found, KV)


# Pace


def test_the_pace_is_that_of_all_reads_that_share_the_link() -> None:
    now = [0.0]
    pace = LinkPace(clock=lambda: now[0])
    assert pace.takes_s(1000) == 0.0

    def later(seconds: float, size: int) -> list[Blob]:
        now[0] += seconds
        return [bytes(size)]

    for _ in range(20):
        now[0] += 100.0  # in which nothing is asked for
        pace.timed(lambda: [*later(1.0, 100), *(pace.timed(lambda: later(1.0, 100)) or [])])
    assert pace.takes_s(150) == pytest.approx(1.0, rel=0.1)
    for _ in range(60):
        pace.timed(lambda: later(0.1, 100))
    assert pace.takes_s(100) == pytest.approx(0.1, rel=0.1)
    assert pace.timed(lambda: None) is None


def test_a_layer_is_awaited_for_as_long_as_others_took_until_all_are_there(
    tmp_path: Path, tier: MemoryTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        assert found.awaited_s > 0.0
        slowly.go_on.set()
        assert same(found, KV)
        assert found.awaited_s == 0.0
