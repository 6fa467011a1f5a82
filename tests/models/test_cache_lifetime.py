"""A fused cache is freed with its last reference: its tensors may be most of the memory."""

import gc
import weakref

import torch

from support.prompts import IDS, STORED, N, quiet_adapter, stale_kv_cache


def test_a_cache_and_its_tensors_are_freed_without_the_garbage_collector():
    adapter = quiet_adapter("llama")
    gc.collect()
    gc.disable()
    try:
        kv_cache = stale_kv_cache(adapter)
        adapter.compute(kv_cache, IDS, adapter.rows(torch.arange(STORED, N)), capture=True)
        adapter.step(kv_cache, IDS[0])
        alive = [weakref.ref(kv_cache), *(weakref.ref(layer.keys) for layer in kv_cache.layers)]
        del kv_cache
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()
