"""A pass waits for slow stored layers before it locks the model, not while it holds the lock."""

import threading
import time

import torch

from kvweave.models.forward import LayerTime
from kvweave.models.fused_cache import PlacedSpan
from kvweave.types import ChunkKV
from support.prompts import IDS, STORED, N, quiet_adapter

WAIT_S = 30.0


class Slow:
    """KV whose first layer takes `first_s` to load, and whose others load when `rest` is set; see `KVLayers`."""

    layer_wait_s = 0.0

    def __init__(self, kv, first_s, rest):
        self.kv, self.first_s, self.rest = kv, first_s, rest
        self.shape, self.dtype, self.nbytes = kv.shape, kv.dtype, kv.nbytes
        self.waiting = threading.Event()
        self.loaded = []

    def load(self, index):
        if index not in self.loaded:
            if index:
                self.waiting.set()
                assert self.rest.wait(WAIT_S)
            else:
                time.sleep(self.first_s)
            self.loaded.append(index)

    def layer(self, index):
        self.load(index)
        return self.kv[index]

    def all_layers(self):
        return torch.stack([self.layer(index) for index in range(self.shape[0])])


def placed(adapter, first_s=0.0):
    """Return a cache with slow stored KV, and that KV."""
    slow = Slow(adapter.encode(IDS[:STORED]).kv, first_s, threading.Event())
    return adapter.new_cache(N, [PlacedSpan(ChunkKV(tuple(IDS[:STORED]), slow), 0, 0)]), slow


def run_pass(adapter, kv_cache):
    return adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(STORED, N)))


def test_other_requests_use_the_model_while_one_waits_for_slow_layers():
    adapter = quiet_adapter("llama")
    slow_kv_cache, slow = placed(adapter, first_s=0.5)
    ready_kv_cache, ready = placed(adapter)
    ready.rest.set()
    expected = run_pass(adapter, ready_kv_cache)
    ready_kv_cache, ready = placed(adapter)
    ready.rest.set()
    found = []
    waits = threading.Thread(target=lambda: found.append(run_pass(adapter, slow_kv_cache)))
    waits.start()
    assert slow.waiting.wait(WAIT_S)
    assert torch.equal(run_pass(adapter, ready_kv_cache), expected)
    assert not found
    slow.rest.set()
    waits.join(WAIT_S)
    assert torch.equal(found[0], expected)


def test_a_pass_starts_with_the_first_layer_if_layers_load_faster_than_they_compute():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    kv_cache.load(layer_s=WAIT_S)
    assert slow.loaded == [0]
    slow.rest.set()
    kv_cache.load(layer_s=0.0)
    assert slow.loaded == list(range(adapter.geometry.layers))


def test_the_layer_time_of_the_last_pass_is_the_lower_bound():
    layer_time = LayerTime()
    assert layer_time.lower_bound_s(100) == 0.0
    layer_time.record(rows=50, layer_s=0.02)
    assert [layer_time.lower_bound_s(rows) for rows in (10, 50, 100)] == [0.004, 0.02, 0.02]


def test_a_pass_records_its_layer_time():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    slow.rest.set()
    run_pass(adapter, kv_cache)
    assert adapter._layer_time.lower_bound_s(N) > 0.0


def test_layers_that_arrive_slower_than_they_compute_are_loaded_even_if_the_first_is_there():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    slow.rest.set()
    slow.layer_wait_s = 0.5
    kv_cache.load(layer_s=1.0)
    assert slow.loaded == [0]
    kv_cache.load(layer_s=0.4)
    assert slow.loaded == list(range(adapter.geometry.layers))
