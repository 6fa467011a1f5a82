"""Update hooks: what they see of the rows about to be replaced, and passes that they end early."""

import threading

import pytest
import torch

from kvweave.models.hooks import StopForward
from kvweave.models.rotary import APPLY_NAME
from support.prompts import IDS, STORED, N, held, quiet_adapter, stale_kv_cache

ALL = torch.arange(N)


class Recorder:
    """Records updates and ends the pass at a layer."""

    def __init__(self, last=None):
        self.last = last
        self.updates = []

    def on_layer(self, update):
        self.updates.append(update)
        if update.layer == self.last:
            raise StopForward


class Layers:
    """Records the layers that attended."""

    def __init__(self):
        self.seen = []

    def on_layer(self, queries):
        self.seen.append(queries.layer)


def test_an_update_hook_sees_the_new_and_the_replaced_rows(adapter):
    fresh = adapter.new_cache(N)
    adapter.compute(fresh, IDS, adapter.rows(ALL))
    placed = stale_kv_cache(adapter)
    adapter.compute(placed, IDS, adapter.rows(ALL[-1:]))
    recorder = Recorder(last=1)
    adapter.run_partial(stale_kv_cache(adapter), IDS, adapter.rows(ALL), recorder)

    assert [update.layer for update in recorder.updates] == [0, 1]
    for update, new, stale in zip(recorder.updates, held(fresh, N), held(placed, N), strict=False):
        assert torch.equal(update.rows, ALL)
        assert torch.equal(update.keys, new[0][0])
        assert torch.equal(update.values, new[1][0])
        assert torch.equal(update.stale_keys[:, :STORED], stale[0][0, :, :STORED])
        assert torch.equal(update.stale_values[:, :STORED], stale[1][0, :, :STORED])
        assert not update.stale_keys[:, STORED:].any()
        assert not update.stale_values[:, STORED:].any()


def test_a_stopped_pass_leaves_its_last_layer_unchanged_and_the_cache_usable(adapter):
    original = getattr(adapter.rotation.module, APPLY_NAME)
    kv_cache, recorder, layers = stale_kv_cache(adapter), Recorder(last=1), Layers()
    plan = adapter.rows(ALL)
    plan.hooks.append(layers)
    adapter.run_partial(kv_cache, IDS, plan, recorder)
    stopped = recorder.updates[-1]
    assert layers.seen == [0]
    assert torch.equal(kv_cache.layers[0].keys[0, :, :N], recorder.updates[0].keys)
    assert torch.equal(kv_cache.layers[1].keys[0, :, :N], stopped.stale_keys)
    assert torch.equal(kv_cache.layers[1].values[0, :, :N], stopped.stale_values)
    assert not kv_cache.layers[2].is_initialized
    adapter.encode(IDS[:5])  # a stopped pass that records rotations
    assert getattr(adapter.rotation.module, APPLY_NAME) is original

    expected = adapter.compute(adapter.new_cache(N), IDS, adapter.rows(ALL))
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
    adapter.run_partial(partial, IDS, adapter.rows(rows), recorder)
    adapter.compute(computed, IDS, adapter.rows(rows))
    assert len(recorder.updates) == adapter.geometry.layers
    for one, other in zip(held(partial, N), held(computed, N), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_later_pass_shows_the_rows_of_the_earlier_one():
    adapter = quiet_adapter("llama")
    kv_cache, recorder = stale_kv_cache(adapter), Recorder()
    adapter.compute(kv_cache, IDS, adapter.rows(ALL))
    before = held(kv_cache, N)
    adapter.run_partial(kv_cache, IDS, adapter.rows(ALL[-5:]), recorder)
    for update, (keys, values) in zip(recorder.updates, before, strict=True):
        assert torch.equal(update.stale_keys, keys[0, :, -5:])
        assert torch.equal(update.stale_values, values[0, :, -5:])


def test_any_other_error_of_a_hook_ends_the_pass_and_is_raised():
    adapter = quiet_adapter("llama")
    kv_cache = stale_kv_cache(adapter)

    class Broken:
        def on_layer(self, update):
            raise RuntimeError("broken hook")

    with pytest.raises(RuntimeError, match="broken hook"):
        adapter.run_partial(kv_cache, IDS, adapter.rows(ALL), Broken())
    expected = adapter.compute(adapter.new_cache(N), IDS, adapter.rows(ALL))
    assert torch.equal(adapter.compute(kv_cache, IDS, adapter.rows(ALL)), expected)
