"""Large KV of the shared tier whose stream is aborted or delivers damaged layers."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave.errors import DamagedEntry, TierUnavailable
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.header import ByteRange, checksum
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.tiers.fetching import FetchedEntry, RemoteReader
from kvweave.kvstore.tiers.loading import Load, Loader
from kvweave.kvstore.tiers.tier import Blob
from kvweave.types import ChunkKV, KVProvenance
from support.fake_remote_tier import FakeRemoteTier, refusing
from support.store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    entry_files,
    eventually,
    get,
    listed,
    put,
    same,
)
from support.streaming_samples import KINDS, KV, LAST, WITHIN_S, Slowly, alter, another, find, present


def aborted(store: ChunkStore, tier: FakeRemoteTier, slowly: Slowly, event: Callable[[], object]) -> None:
    """Find KV, let something happen, and get an error from the last layer."""
    with store.lease() as lease:
        found = present(find(store, lease))
        assert torch.equal(found.layer(0), KV.layer(0))
        event()
        slowly.go_on.set()
        with pytest.raises(DamagedEntry):
            found.layer(LAST)
        with pytest.raises(DamagedEntry):
            found.kv  # noqa: B018


def test_a_server_that_dies_while_an_entry_streams_is_no_damage_and_a_retry_is_a_miss(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        def away(call: str, keys: Sequence[str]) -> None:
            raise TierUnavailable("away")

        tier.before = away

    with another(tmp_path, tier) as store:
        aborted(store, tier, slowly, die)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 0
        assert len(tier.held) == 1
        assert listed(store, KV) == [False]
        tier.before = lambda call, keys: None
        assert eventually(lambda: get(store, KV) is not None)


def test_an_entry_whose_rest_never_arrives_is_fetched_whole(
    tmp_path: Path, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun = tier.get_ranges, threading.Event()

    def get_ranges(key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        if not ranges[0][0]:
            return read(key, ranges)
        assert begun.wait(60)  # a failure before that would make `find` read it whole
        return None

    monkeypatch.setattr(tier, "get_ranges", get_ranges)
    with another(tmp_path, tier) as store, store.lease() as lease:
        found = present(find(store, lease))
        begun.set()
        with pytest.raises(DamagedEntry, match="cannot be had"):
            found.layer(LAST)
        assert same(find(store, lease), KV)  # whole, after streaming failed
        assert tier.calls == ["get_ranges", "get_many"]


@pytest.mark.parametrize("at", [-3, None])
def test_a_damaged_or_truncated_late_layer_is_counted_logged_and_deleted_from_the_tier(
    at: int | None, tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        ((key, data),) = tier.held.items()
        if at is None:
            tier.held[key] = data[: len(data) // 2]
        else:
            alter(tier, len(data) + at)

    with another(tmp_path, tier) as store, caplog.at_level(logging.WARNING, "kvweave"):
        aborted(store, tier, slowly, spoil)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 1
        assert tier.held == {}
        assert caplog.text.count("shared entry dropped") == 1
        assert listed(store, KV) == [False]
        assert entry_files(store.folder) == []


def test_an_entry_with_damage_in_an_unused_layer_is_not_stored(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        fetcher = store.tiers.fetcher
        assert fetcher is not None
        with store.lease() as lease:
            found = present(find(store, lease))
            alter(tier, len(next(iter(tier.held.values()))) - 3)
            slowly.go_on.set()
            assert eventually(lambda: fetcher.pending == 0)
            assert torch.equal(found.layer(3), KV.layer(3))
        assert entry_files(store.folder) == []
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 1


def test_damage_in_the_beginning_is_found_at_once(tmp_path: Path, tier: FakeRemoteTier) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        alter(tier, 100)
        assert find(store, lease) is None
        assert store.stats().damaged == 1
        assert tier.held == {}


def test_an_entry_deleted_while_it_streams_is_no_damage(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    with another(tmp_path, tier) as store:
        aborted(store, tier, slowly, tier.held.clear)
        with store.lease() as lease:
            assert find(store, lease) is None
        assert store.stats().damaged == 0


def test_an_entry_replaced_by_another_machine_is_no_damage_and_a_retry_finds_the_new_one(
    tmp_path: Path, tier: FakeRemoteTier, slowly: Slowly
) -> None:
    other = ChunkKV(KV.token_ids, KV.kv + 0.25)

    def replace() -> None:
        with ChunkStore(tmp_path / "third", shared="memory:") as third:
            tier.held.clear()
            put(third, other)

    with another(tmp_path, tier) as store:
        aborted(store, tier, slowly, replace)
        with store.lease() as lease:
            assert same(find(store, lease), other)
        assert store.stats().damaged == 0
        assert len(tier.held) == 1
        assert eventually(lambda: listed(store, KV) == [True])
        store.forget_recent()
        assert same(get(store, KV), other)


def test_an_interrupt_while_a_piece_is_read_leaves_it_to_other_threads(
    tmp_path: Path, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, interrupted = tier.get_ranges, threading.Event()
    (main,) = [threading.main_thread()]

    def get_ranges(key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
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


def test_damage_that_a_second_thread_meets_later_makes_nobody_fetch_again(
    tmp_path: Path, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborts: list[Callable[[], object]] = []
    aborted_late = threading.Event()
    fetch, start = RemoteReader.fetch, Loader.start

    def fetch_and_note(
        self: RemoteReader, key: EntryKey, on_abort: Callable[[], object], *, whole: bool
    ) -> FetchedEntry | None:
        aborts.append(on_abort)
        return fetch(self, key, on_abort, whole=whole)

    def start_and_wait(self: Loader[Any], *args: Any, **kwargs: Any) -> Load[Any]:
        load = start(self, *args, **kwargs)
        assert aborted_late.wait(WITHIN_S)
        return load

    monkeypatch.setattr(RemoteReader, "fetch", fetch_and_note)
    with another(tmp_path, tier) as store, store.lease() as lease:
        alter(tier, len(next(iter(tier.held.values()))) - 3)
        found = present(find(store, lease))
        with pytest.raises(DamagedEntry):
            found.kv  # noqa: B018
        assert len(aborts) == 1

        def before(call: str, keys: Sequence[str]) -> None:
            if call == "get_many":
                aborts[0]()
                aborted_late.set()
            refusing("delete")(call, keys)

        tier.before = before
        tier.calls.clear()
        monkeypatch.setattr(Loader, "start", start_and_wait)
        assert find(store, lease) is None
        assert tier.calls.count("get_many") == 1


def test_a_damaged_entry_that_cannot_be_deleted_is_streamed_only_once(
    tmp_path: Path, tier: FakeRemoteTier
) -> None:
    provenances = [KVProvenance("observed", (SYSTEM,)), ISOLATED]  # one key
    with another(tmp_path, tier) as store, store.lease() as lease:
        alter(tier, len(next(iter(tier.held.values()))) - 3)
        tier.before = refusing("delete")
        (found,) = store.find(MODEL, [(KV.token_ids, provenances)], lease)
        assert found is not None
        with pytest.raises(DamagedEntry):
            found[0].kv  # noqa: B018
        tier.calls.clear()
        for _ in range(3):
            assert store.find(MODEL, [(KV.token_ids, provenances)], lease) == [None]
        assert tier.calls.count("get_many") == 3
        assert "get_ranges" not in tier.calls
        assert len(tier.held) == 1


def test_an_entry_that_cannot_be_stored_is_released(
    tmp_path: Path, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(fetched: object) -> None:
        raise RuntimeError("out of memory")

    with another(tmp_path, tier) as store, store.lease() as lease:
        fetcher = store.tiers.fetcher
        assert fetcher is not None
        monkeypatch.setattr(fetcher, "store", keep)
        assert same(find(store, lease), KV)
        assert eventually(lambda: fetcher.pending == 0)
        assert eventually(lambda: "out of memory" in caplog.text)


def test_after_closing_the_missing_layers_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, provenance = KINDS["int8"]  # whose pieces are read in several concurrent requests
    shared = f"file://{tmp_path}/shared"
    with ChunkStore(tmp_path / "first", shared=shared) as first:
        put(first, kv, provenance)
    with ChunkStore(tmp_path / "second", shared=shared) as second:
        fetcher = second.tiers.fetcher
        assert fetcher is not None
        monkeypatch.setattr(fetcher.loader, "run_later", lambda task: None)
        with second.lease() as lease:
            found = present(find(second, lease, kv, provenance))
            assert torch.equal(found.layer(0), kv.layer(0))
    for _ in range(2):
        with pytest.raises(DamagedEntry, match="cannot be had"):
            found.layer(15)
    assert torch.equal(found.layer(0), kv.layer(0))


# Headers whose checksum holds, and that are impossible all the same


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The entry with a changed header whose checksum holds."""
    end = 8 + int.from_bytes(data[:8], "little")
    document = json.loads(data[8:end])
    change(document)
    document["__metadata__"]["checksum_header"] = "0" * 16
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    stated = f'"checksum_header":"{checksum(header)}"'.encode()
    return header.replace(b'"checksum_header":"0000000000000000"', stated) + data[end:]


def swapped(document: dict[str, Any]) -> None:
    """Put the ids after the layers."""
    ids, kv = document["token_ids"], document["kv"]
    size, all_bytes = ids["data_offsets"][1], kv["data_offsets"][1]
    kv["data_offsets"], ids["data_offsets"] = [0, all_bytes - size], [all_bytes - size, all_bytes]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "more than any memory": lambda of: of["kv"].update(data_offsets=[80_000, 10**15]),
    "more than any number": lambda of: of["kv"].update(data_offsets=[80_000, 10**30]),
    "no offsets": lambda of: of["kv"].pop("data_offsets"),
    "one offset": lambda of: of["kv"].update(data_offsets=[80_000]),
    "negative": lambda of: of["kv"].update(data_offsets=[-5, of["kv"]["data_offsets"][1]]),
    "backwards": lambda of: of["kv"].update(data_offsets=of["kv"]["data_offsets"][::-1]),
    "fractions": lambda of: of["kv"].update(data_offsets=[80_000.5, 4e6]),
    "a gap": lambda of: of["kv"].update(data_offsets=[80_004, of["kv"]["data_offsets"][1]]),
    "words": lambda of: of.update(kv="here"),
    "no tensors": lambda of: (of.pop("kv"), of.pop("token_ids")),
    "no layers": lambda of: of["__metadata__"].update(layer_checksums="[]"),
    "as many layers as do not divide": lambda of: of["__metadata__"].update(layer_checksums='["", "", "", "", "", "", ""]'),
    "no list of layers": lambda of: of["__metadata__"].update(layer_checksums="7"),
    "too deep": lambda of: of["__metadata__"].update(checksums="[" * 100_000),
    "no dtype": lambda of: of["kv"].update(dtype="F99"),
    "another shape": lambda of: of["kv"].update(shape=[3]),
    "an absurd shape": lambda of: of["kv"].update(shape=[10**30]),
    "ids at the end": swapped,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_an_impossible_header_is_a_counted_miss(name: str, tmp_path: Path, tier: FakeRemoteTier) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        ((key, data),) = tier.held.items()
        tier.held[key] = with_header(data, CHANGES[name])
        assert find(store, lease) is None
        assert store.stats().damaged == 1
        assert tier.held == {}


def test_a_header_with_other_metadata_is_accepted(tmp_path: Path, tier: FakeRemoteTier) -> None:
    with another(tmp_path, tier) as store, store.lease() as lease:
        ((key, data),) = tier.held.items()
        tier.held[key] = with_header(data, lambda of: of["__metadata__"].update(model_name="another name"))
        assert same(find(store, lease), KV)
