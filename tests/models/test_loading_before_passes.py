"""Stored layers that come slowly are waited for before a pass takes the model, not while it has it."""

import threading
import time

import torch
from prompts import IDS, STORED, N, quiet_adapter

from kvweave.models.adapter import LayerPace
from kvweave.models.fused_cache import PlacedSpan
from kvweave.types import ChunkKV

WAIT_S = 30.0


class Slow:
    """KV whose first layer takes `first_s` to come, and whose others come when `rest` is set; see `KVLayers`."""

    awaited_s = 0.0

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

    def whole(self):
        return torch.stack([self.layer(index) for index in range(self.shape[0])])


def placed(adapter, first_s=0.0):
    """A canvas behind slow stored KV, and that KV."""
    slow = Slow(adapter.encode(IDS[:STORED]).kv, first_s, threading.Event())
    return adapter.new_cache(N, [PlacedSpan(ChunkKV(tuple(IDS[:STORED]), slow), 0, 0)]), slow


def passed(adapter, kv_cache):
    return adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(STORED, N)))


def test_others_have_the_model_while_a_request_waits_for_slow_layers():
    adapter = quiet_adapter("llama")
    slow_kv_cache, slow = placed(adapter, first_s=0.5)
    ready_kv_cache, ready = placed(adapter)
    ready.rest.set()
    expected = passed(adapter, ready_kv_cache)
    ready_kv_cache, ready = placed(adapter)
    ready.rest.set()
    found = []
    waits = threading.Thread(target=lambda: found.append(passed(adapter, slow_kv_cache)))
    waits.start()
    assert slow.waiting.wait(WAIT_S)
    assert torch.equal(passed(adapter, ready_kv_cache), expected)
    assert not found
    slow.rest.set()
    waits.join(WAIT_S)
    assert torch.equal(found[0], expected)


def test_a_pass_begins_with_the_first_layer_where_layers_come_faster_than_they_are_computed():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    kv_cache.load(layer_s=WAIT_S)
    assert slow.loaded == [0]
    slow.rest.set()
    kv_cache.load(layer_s=0.0)
    assert slow.loaded == list(range(adapter.geometry.layers))


def test_the_pace_of_the_last_pass_is_the_least_that_a_layer_takes():
    pace = LayerPace()
    assert pace.least_s(100) == 0.0
    pace.ran(rows=50, layer_s=0.02)
    assert [pace.least_s(rows) for rows in (10, 50, 100)] == [0.004, 0.02, 0.02]


def test_passes_set_the_pace():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    slow.rest.set()
    passed(adapter, kv_cache)
    assert adapter._pace.least_s(N) > 0.0


def test_layers_that_are_awaited_longer_than_they_are_computed_are_loaded_though_the_first_is_there():
    adapter = quiet_adapter("llama")
    kv_cache, slow = placed(adapter)
    slow.rest.set()
    slow.awaited_s = 0.5
    kv_cache.load(layer_s=1.0)
    assert slow.loaded == [0]
    kv_cache.load(layer_s=0.4)
    assert slow.loaded == list(range(adapter.geometry.layers))
