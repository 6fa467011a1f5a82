"""Large KV in a shared tier for the tests, and a link that is as slow as they want."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.keys import quantised
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.tier import Blob
from kvweave.types import ChunkKV, KVProvenance
from support.fake_remote_tier import FakeRemoteTier
from support.store_samples import ISOLATED, MODEL, chunk, put, quantised_chunk

WITHIN_S = 60.0
LAYERS, TOKENS = 12, 10_000  # 320 kB for each layer
KV = chunk(1, tokens=TOKENS, layers=LAYERS)
LAST = LAYERS - 1
WIDE = torch.randn(16, 2, 1, 2500, 64)

KINDS: dict[str, tuple[ChunkKV, KVProvenance]] = {
    "exact": (KV, ISOLATED),
    **{
        storage: (quantised_chunk(1, storage, 2500, WIDE), quantised(ISOLATED, storage))
        for storage in ("int8", "int4")
    },
}


class Slowly:
    """Holds back ranges after an entry's beginning until `go_on` is set, except those that `lets` lets through."""

    def __init__(self, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.asked: list[ByteRange] = []
        self.held_back: list[ByteRange] = []
        self.lets = lambda ranges: False
        self._read = tier.get_ranges
        monkeypatch.setattr(tier, "get_ranges", self.get_ranges)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        self.asked += ranges
        if ranges[0][0] and not self.lets(ranges):
            self.held_back += ranges
            assert self.go_on.wait(WITHIN_S)
        return self._read(key, ranges)


def published(tmp_path: Path, *chunks: ChunkKV, provenance: KVProvenance = ISOLATED) -> None:
    """Have the other machine publish these."""
    with ChunkStore(tmp_path / "first", shared="memory:") as first:
        for kv in chunks:
            put(first, kv, provenance)


@contextmanager
def another(
    tmp_path: Path, tier: FakeRemoteTier, kv: ChunkKV = KV, provenance: KVProvenance = ISOLATED
) -> Iterator[ChunkStore]:
    """The store of a machine, after another one has published this."""
    published(tmp_path, kv, provenance=provenance)
    tier.calls.clear()
    with ChunkStore(tmp_path / "second", shared="memory:") as second:
        yield second


def find(
    store: ChunkStore, lease: Lease, kv: ChunkKV = KV, provenance: KVProvenance = ISOLATED
) -> ChunkKV | None:
    (found,) = store.find(MODEL, [(kv.token_ids, [provenance])], lease)
    return None if found is None else found[0]


def present(found: ChunkKV | None) -> ChunkKV:
    assert found is not None
    return found


def alter(tier: FakeRemoteTier, at: int) -> None:
    ((key, data),) = tier.held.items()
    tier.held[key] = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
