"""Hooks: what they see of a pass, and passes that they end early."""

import threading

import pytest
import torch

from kvweave.models.hooks import StopForward
from kvweave.models.rotary import APPLY_NAME
from support.prompts import IDS, N, held, quiet_adapter, stale_kv_cache

ALL = torch.arange(N)


class Recorder:
    """Records what the layers attend to, and ends the pass at a layer."""

    def __init__(self, last=None):
        self.last = last
        self.seen = []

    def on_layer(self, queries):
        self.seen.append(queries)
        if queries.layer == self.last:
            raise StopForward


def partial_pass(adapter, kv_cache, rows, hook):
    plan = adapter.rows(rows)
    plan.hooks.append(hook)
    adapter.run_partial(kv_cache, IDS, plan)


def test_a_hook_sees_stored_and_new_keys_and_values_in_prompt_order(adapter):
    kv_cache, recorder, rows = stale_kv_cache(adapter), Recorder(), ALL[30:]
    partial_pass(adapter, kv_cache, rows, recorder)
    assert [queries.layer for queries in recorder.seen] == list(range(adapter.geometry.layers))
    for queries, (keys, values) in zip(recorder.seen, held(kv_cache, N), strict=True):
        assert torch.equal(queries.rows, rows)
        assert torch.equal(queries.keys, keys)
        assert torch.equal(queries.values, values)


def test_a_stopped_pass_writes_the_layers_that_ran_and_leaves_the_cache_usable(adapter):
    original = getattr(adapter.rotation.module, APPLY_NAME)
    whole, kv_cache, recorder = adapter.new_cache(N), stale_kv_cache(adapter), Recorder(last=1)
    expected = adapter.compute(whole, IDS, adapter.rows(ALL))
    partial_pass(adapter, kv_cache, ALL, recorder)
    assert [queries.layer for queries in recorder.seen] == [0, 1]
    for layer in (0, 1):
        assert torch.equal(kv_cache.layers[layer].keys[:, :, :N], held(whole, N)[layer][0])
        assert torch.equal(kv_cache.layers[layer].values[:, :, :N], held(whole, N)[layer][1])
    assert not kv_cache.layers[2].is_initialized
    adapter.encode(IDS[:5])  # a stopped pass that records rotations
    assert getattr(adapter.rotation.module, APPLY_NAME) is original

    found = []
    thread = threading.Thread(
        target=lambda: found.append(adapter.compute(kv_cache, IDS, adapter.rows(ALL))), daemon=True
    )
    thread.start()
    thread.join(timeout=60)  # it would wait forever if the stopped pass had kept the lock
    assert torch.equal(found[0], expected)


def test_a_partial_pass_that_is_not_stopped_writes_what_compute_writes():
    adapter = quiet_adapter("llama")
    rows = torch.arange(30, N)
    partial, computed, recorder = stale_kv_cache(adapter), stale_kv_cache(adapter), Recorder()
    partial_pass(adapter, partial, rows, recorder)
    adapter.compute(computed, IDS, adapter.rows(rows))
    assert len(recorder.seen) == adapter.geometry.layers
    for one, other in zip(held(partial, N), held(computed, N), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_any_other_error_of_a_hook_ends_the_pass_and_is_raised():
    adapter = quiet_adapter("llama")
    kv_cache = stale_kv_cache(adapter)

    class Broken:
        def on_layer(self, queries):
            raise RuntimeError("broken hook")

    with pytest.raises(RuntimeError, match="broken hook"):
        partial_pass(adapter, kv_cache, ALL, Broken())
    expected = adapter.compute(adapter.new_cache(N), IDS, adapter.rows(ALL))
    assert torch.equal(adapter.compute(kv_cache, IDS, adapter.rows(ALL)), expected)
