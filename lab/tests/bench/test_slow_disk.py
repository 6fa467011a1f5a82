"""A simulated slow disk: when the KV of a store arrives, and that it is read again once it has been read."""

import pytest
import torch

from kvweave.kvstore import chunk_store
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.types import ChunkKV, KVProvenance, ModelFingerprint
from kvweave_lab.bench.serving import slow_disk
from kvweave_lab.bench.serving.slow_disk import SlowDisk, SlowFiles

LAYERS, TOKENS = 4, 32
LAYER_BYTES = 2 * 1 * TOKENS * 16 * 4
EXACT = KVProvenance("prefix", ())
MODEL = ModelFingerprint("model", "weights", "configuration", "tokenizer", "float32", "digest")


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only while somebody sleeps."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(slow_disk, "time", clock)
    return clock


def test_one_disk_reads_in_order(clock):
    disk = SlowDisk(10)
    assert disk.read([10, 20]) == [101.0, 103.0]
    assert disk.read([5]) == [103.5]  # after the others
    clock.now = 110.0
    assert disk.read([10]) == [111.0]


def test_layers_arrive_one_after_the_other_and_are_read_again_once_they_are_there(
    clock, monkeypatch, tmp_path
):
    monkeypatch.setattr(chunk_store, "EntryFiles", SlowFiles)
    monkeypatch.setattr(SlowFiles, "disk", SlowDisk(LAYER_BYTES), raising=False)  # a layer a second
    kv = ChunkKV(tuple(range(TOKENS)), torch.rand(LAYERS, 2, 1, TOKENS, 16))

    def find(store):
        ((found, _),) = store.find(MODEL, [(kv.token_ids, [EXACT])])
        return found

    with ChunkStore(tmp_path, limit_bytes=10**9) as store:
        assert store.put(MODEL, kv, EXACT, ["document"])
        began = clock.now
        with store.lease() as lease:
            ((found, _),) = store.find(MODEL, [(kv.token_ids, [EXACT])], lease)
            header_s = clock.now - began
            assert header_s < 1
            assert torch.equal(found.layer(1), kv.layer(1))
            assert clock.now - began == pytest.approx(2 + header_s)
            assert found.layer_wait_s == pytest.approx(1)
            ((again, _),) = store.find(MODEL, [(kv.token_ids, [EXACT])], lease)
            again.layer(3)  # the same read: nothing is read twice at a time
            assert clock.now - began == pytest.approx(4 + header_s)
            assert found.layer_wait_s == 0
        began = clock.now
        find(store).layer(3)
        assert clock.now - began == pytest.approx(4 + header_s)
