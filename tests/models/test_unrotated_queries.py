"""UnrotatedQueries: rotating what it records gives the queries of attention."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.hooks import UnrotatedQueries
from support.prompts import IDS, N, quiet_adapter, stale_kv_cache

ROWS = torch.cat([torch.arange(5, 15), torch.arange(30, N)])


class Rotated:
    """Records the rotated queries of every layer."""

    def __init__(self):
        self.queries = {}

    def on_layer(self, queries):
        self.queries[queries.layer] = queries.query


def run_with(adapter, *hooks, capture=False):
    kv_cache, plan = stale_kv_cache(adapter), adapter.rows(ROWS)
    plan.hooks.extend(hooks)
    return kv_cache, adapter.compute(kv_cache, IDS, plan, capture=capture)


def test_rotating_them_with_the_models_own_function_gives_the_queries_of_attention(adapter):
    layers = range(adapter.geometry.layers)
    unrotated, rotated = UnrotatedQueries(layers), Rotated()
    run_with(adapter, unrotated, rotated)
    angles = adapter.rotation.angles(ROWS, N, torch.empty(0))
    for layer in layers:
        query = unrotated.of(layer)
        assert query.shape == rotated.queries[layer].shape == (1, 4, len(ROWS), adapter.geometry.head_width)
        assert torch.equal(angles.rotate(layer, query), rotated.queries[layer])
        if adapter.rotation.layers[layer].embedding is not None:
            assert not torch.equal(query, rotated.queries[layer])


def test_recording_changes_no_bit_of_the_pass_and_works_with_capture(adapter):
    _, plain = run_with(adapter)
    unrotated = UnrotatedQueries({0, 2})
    kv_cache, logits = run_with(adapter, unrotated, capture=True)
    alone, again = run_with(adapter, capture=True)
    assert torch.equal(plain, logits)
    assert torch.equal(plain, again)
    kept = [adapter.extract_chunk_kv(c, IDS, 30, N).kv for c in (kv_cache, alone)]
    assert torch.equal(kept[0], kept[1])
    only = UnrotatedQueries({2})
    run_with(adapter, only)
    assert torch.equal(only.of(2), unrotated.of(2))


def test_a_layer_that_was_not_recorded_is_refused():
    unrotated = UnrotatedQueries({2})
    run_with(quiet_adapter("llama"), unrotated)
    with pytest.raises(InvalidRequest, match="layer 1 was not recorded"):
        unrotated.of(1)
