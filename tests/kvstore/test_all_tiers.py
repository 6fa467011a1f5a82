"""Every tier of a store through the same checks, as look-ups use it: device, host, disk and each kind of shared tier."""

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvweave.errors import DamagedEntry
from kvweave.kvstore.chunk_store import ChunkStore, open_remote_tier
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.reports import TierName, TierTotals
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.types import ChunkFeature, ChunkKV
from support.store_samples import (
    ISOLATED,
    MODEL,
    chunk,
    entry_files,
    eventually,
    feature,
    get,
    put,
    put_feature,
    same,
    same_feature,
)
from support.tier_servers import SHARED, url_of

CAP = 10**6


class Place:
    """A tier, the store `writer` that fills it, and the store `reader` that is served from it."""

    def __init__(self, name: TierName, writer: ChunkStore, reader: ChunkStore, address: str = "") -> None:
        self.name = name
        self.writer = writer
        self.reader = reader
        self.address = address

    @property
    def totals(self) -> TierTotals:
        """Return the entries of the tier, as the writer knows them."""
        return self.writer.stats().by_tier[self.name]

    def fill(self, chunks: Sequence[ChunkKV], features: Sequence[ChunkFeature] = ()) -> None:
        """Bring these into the empty tier."""
        for kv in chunks:
            assert put(self.writer, kv)
        for about in features:
            assert put_feature(self.writer, about, ISOLATED)
        if self.name in ("device", "host"):
            self.find(chunks, features)
        assert eventually(lambda: self.totals.entries == len(chunks) + len(features))

    def find(
        self, chunks: Sequence[ChunkKV], features: Sequence[ChunkFeature] = ()
    ) -> tuple[list[ChunkKV | None], list[ChunkFeature | None]]:
        """Return the result of a look-up for each entry."""
        kv = self.reader.find(MODEL, [(one.token_ids, [ISOLATED]) for one in chunks])
        about = self.reader.find_features(MODEL, [(one.token_ids, ISOLATED) for one in features])
        return [None if found is None else found[0] for found in kv], about

    def hits(self) -> int:
        """How many look-ups were served from here."""
        return self.reader.stats().by_tier[self.name].hits


@pytest.fixture(params=["device", "host", "disk", *SHARED])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    """A tier with a cap of `CAP`. A shared one is read by a machine without local space."""
    kind, folder = request.param, tmp_path / "store"
    if kind not in SHARED:
        with ChunkStore(folder, limit_bytes=CAP, host_bytes=CAP if kind == "host" else 0) as store:
            if kind == "device":  # the CPU: the device makes no difference here
                store.tiers.attach(DeviceTier(torch.device("cpu"), CAP, store.pins.in_use))
            yield Place(kind, store, store)
        return
    shared = url_of(kind, request, monkeypatch, tmp_path)
    name = secrets.token_hex(8)
    with (
        ChunkStore(folder, namespace=name, shared=shared, shared_bytes=CAP) as writer,
        ChunkStore(tmp_path / "other", namespace=name, shared=shared, limit_bytes=0) as reader,
    ):
        yield Place("shared", writer, reader, shared)


def test_entries_are_served_bit_for_bit(place: Place) -> None:
    chunks = [chunk(1), chunk(2, tokens=0), chunk(3, tokens=2000, dtype=torch.bfloat16)]
    features = [feature(4)] if place.name != "device" else []  # which holds only KV
    assert place.find(chunks, features) == ([None] * 3, [None] * len(features))
    place.fill(chunks, features)
    before = place.hits()
    kv, about = place.find([*chunks, chunk(99)], features)
    assert place.hits() - before == len(chunks) + len(features)
    assert all(map(same, kv[:3], chunks))
    assert kv[3] is None
    assert all(
        found is not None and same_feature(found, one) for found, one in zip(about, features, strict=True)
    )
    assert 0 < place.totals.bytes <= CAP


def test_disowning_removes_these_entries_from_the_tier_and_no_others(place: Place) -> None:
    removed, kept = chunk(1), chunk(2)
    place.writer.own("document", [digest_tokens(removed.token_ids)])
    place.fill([removed, kept])
    assert place.writer.disown("document") == 1
    assert eventually(lambda: place.totals.entries == 1)
    before = place.hits()
    (gone, still), _ = place.find([removed, kept])
    assert gone is None
    assert same(still, kept)
    assert place.hits() - before == 1


def test_a_tier_can_be_cleared(place: Place) -> None:
    place.fill([chunk(1), chunk(2)])
    assert place.writer.clear(place.name) == 2
    assert (place.totals.entries, place.totals.bytes) == (0, 0)
    before = place.hits()
    place.find([chunk(1), chunk(2)])
    assert place.hits() == before
    assert place.writer.clear(place.name) == 0 or place.name in (
        "device",
        "host",
    )  # where they may be again by now


def test_the_cap_holds_and_retrieved_entries_stay(place: Place) -> None:
    chunks = [chunk(seed) for seed in range(4)]
    place.fill(chunks)
    size = place.totals.bytes // 4
    for _ in range(3):
        assert same(get(place.writer, chunks[2]), chunks[2])
    place.writer.stats()  # writes the counts
    place.writer.set_limit(2 * size + size // 2, place.name)
    assert place.totals.entries == 2
    assert place.totals.bytes <= 2 * size + size // 2
    before = place.hits()
    (found,), _ = place.find([chunks[2]])
    assert same(found, chunks[2])
    assert place.hits() - before == 1


def test_several_threads_may_use_it_at_once(place: Place) -> None:
    chunks = [chunk(seed) for seed in range(8)]
    place.fill(chunks)

    def find(number: int) -> bool:
        found, _ = place.find(chunks[number % 8 :])
        return all(map(same, found, chunks[number % 8 :]))

    before = place.hits()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(find, range(16)))
    assert place.hits() - before == 2 * sum(range(1, 9))


def test_a_damaged_entry_is_neither_served_nor_stored(place: Place) -> None:
    kv = chunk(1)
    if place.name == "shared":
        place.fill([kv])
        tier = open_remote_tier(place.address, place.writer.namespace)
        ((key, _),) = tier.sizes().items()
        altered = bytearray(tier.get_many([key])[key])
        altered[-3] ^= 16
        tier.put(key, altered)
        tier.close()
    else:
        assert put(place.writer, kv)
        (file,) = entry_files(place.writer.folder)
        altered = bytearray(file.read_bytes())
        altered[-3] ^= 16
        file.write_bytes(altered)
        place.writer.forget_recent()
    (found,), _ = place.find([kv])
    if found is not None:  # damage of a layer is reported when the layer is used
        with pytest.raises(DamagedEntry, match="layer 1"):
            same(found, kv)
    assert get(place.reader, kv) is None
    place.reader.tiers.reads.close()  # waits for background work
    assert place.reader.stats().by_tier[place.name].entries == 0
    assert place.reader.stats().damaged == 1
