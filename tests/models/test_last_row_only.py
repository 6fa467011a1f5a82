"""Passes that run the last layer for the last row only, against plain transformers, which runs it for all rows."""

import pytest
import torch

from kvweave.models.forward import decoder_layers
from kvweave.testing import FAMILIES
from support.oracle import partial_prefill, stock
from support.prompts import IDS, N, held, quiet_adapter, stale_kv_cache

ROWS = torch.cat([torch.arange(20, 36), torch.arange(50, N)])
TOLERANCE = 2e-4  # as in the parity tests


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_all_rows_keys_and_values_equal_those_of_the_whole_layer(family):
    adapter = quiet_adapter(family)
    kv_cache, placed = stale_kv_cache(adapter), stale_kv_cache(adapter)
    adapter.compute(placed, IDS, adapter.rows(torch.tensor([N - 1])))
    before = held(placed, N)
    got = adapter.compute(kv_cache, IDS, adapter.rows(ROWS))
    whole = written_by_the_whole_layer(adapter)  # before the model gets the library's attention
    adapter.rotation.reset_lengths()
    expected = partial_prefill(stock(adapter.model), IDS, ROWS, before)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    (keys, values), (old_keys, old_values) = held(kv_cache, N)[-1], before[-1]
    assert not torch.equal(keys[:, :, ROWS], old_keys[:, :, ROWS])
    torch.testing.assert_close(keys, whole[0], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(values, whole[1], atol=TOLERANCE, rtol=TOLERANCE)
    others = ~torch.isin(torch.arange(N), ROWS)
    assert torch.equal(values[:, :, others], old_values[:, :, others])


def written_by_the_whole_layer(adapter):
    """Return the last layer's keys and values after a pass for each row, in which that row is the last."""
    kv_cache = stale_kv_cache(adapter)
    for row in ROWS:
        adapter.compute(kv_cache, IDS, adapter.rows(row[None]))
    return held(kv_cache, N)[-1]


def test_the_last_layers_network_runs_for_one_row():
    adapter = quiet_adapter("llama")
    kv_cache, seen = stale_kv_cache(adapter), []
    layers = decoder_layers(adapter.model)
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
        for layer in layers
    ]
    adapter.compute(kv_cache, IDS, adapter.rows(ROWS))
    for hook in hooks:
        hook.remove()
    assert seen == [ROWS.numel()] * (len(layers) - 1) + [1]


def test_hooks_see_all_rows_once_and_change_no_bit():
    adapter = quiet_adapter("llama")
    seen, plan = Seen(), adapter.rows(ROWS)
    plan.hooks.append(seen)
    hooked = adapter.compute(stale_kv_cache(adapter), IDS, plan, capture=True)
    assert torch.equal(hooked, adapter.compute(stale_kv_cache(adapter), IDS, adapter.rows(ROWS)))
    assert [rows.tolist() for rows in seen.rows] == [ROWS.tolist()] * adapter.geometry.layers


class Seen:
    """Records the rows of each layer."""

    def __init__(self):
        self.rows = []

    def on_layer(self, layer):
        self.rows.append(layer.rows)
