"""Passes that do not project rows with stored queries."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from prompts import IDS, N, quiet_adapter

from kvweave.errors import InvalidRequest
from kvweave.models.forward import decoder_layers
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import UnrotatedQueries

ALL, STORED = torch.arange(N), 40
TOLERANCE = 2e-4  # as in the parity tests
FALLING_BACK = {"phi3": "qkv_proj", "gpt-neox": "query_key_value", "phi": "part of a head", "smollm3": "NoPE"}


class Rotated:
    """Records the rotated queries of every layer."""

    def __init__(self):
        self.queries = {}

    def on_layer(self, queries):
        self.queries[queries.layer] = queries.query


def whole(adapter, *hooks):
    """Return the logits of a pass over the prompt, and its cache with captured queries."""
    kv_cache, plan = adapter.new_cache(N), adapter.rows(ALL)
    layers = range(adapter.geometry.layers)
    queries = UnrotatedQueries(layers)
    plan.hooks.extend([queries, *hooks])
    logits = adapter.compute(kv_cache, IDS, plan, capture=True)
    kv_cache.capture.queries = torch.cat([queries.of(layer) for layer in layers])
    return logits, kv_cache


def placed(adapter, kv_cache, *edges):
    """Return a cache with the spans between these positions of a computed one."""
    spans = [
        PlacedSpan(adapter.extract_chunk_kv(kv_cache, IDS, start, end), start, start)
        for start, end in pairwise(edges)
    ]
    return adapter.new_cache(N, spans)


def close(one, other):
    torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_with_stored_queries_need_no_projection_in_supported_families(adapter):
    rotated = Rotated()
    logits, kv_cache = whole(adapter, rotated)
    held = placed(adapter, kv_cache, 0, 15, STORED)
    if adapter.projections is None:
        with pytest.raises(InvalidRequest, match=f"{type(adapter.model).__name__} does not make"):
            adapter.compute(held, IDS, adapter.rows(ALL), projected=ALL[STORED:])
        return
    plan, seen = adapter.rows(ALL), Rotated()
    plan.hooks.append(seen)
    close(adapter.compute(held, IDS, plan, projected=ALL[STORED:]), logits)
    for layer, query in rotated.queries.items():
        close(seen.queries[layer], query)
    for mine, other in zip(held.layers, kv_cache.layers, strict=True):
        close(mine.keys[:, :, :N], other.keys[:, :, :N])
        close(mine.values[:, :, :N], other.values[:, :, :N])


@pytest.mark.parametrize("family", FALLING_BACK)
def test_families_without_separate_projections_are_recognised(family):
    assert quiet_adapter(family).projections is None


def test_any_rows_may_be_projected_and_are_captured():
    adapter = quiet_adapter("qwen3")
    logits, kv_cache = whole(adapter)
    held = placed(adapter, kv_cache, 0, 15, STORED)
    some = torch.cat([ALL[3:9], ALL[20:22], ALL[STORED:]])
    close(adapter.compute(held, IDS, adapter.rows(ALL), projected=some, capture=True), logits)
    close(held.capture.kv[:, :, :, some], kv_cache.capture.kv[:, :, :, some])


@contextmanager
def last_layers_input(adapter):
    """Record the last layer's input of every row; logits do not depend on that of rows with stored keys and values."""
    seen = []
    block = decoder_layers(adapter.model)[-1]
    hook = block.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    yield seen
    hook.remove()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rows_with_stored_queries_run_with_them(family):
    adapter = quiet_adapter(family)
    with last_layers_input(adapter) as seen:
        _, kv_cache = whole(adapter)
        kv = adapter.extract_chunk_kv(kv_cache, IDS, 0, STORED)
        for queries in (kv.queries, -3 * kv.queries):
            held = adapter.new_cache(N, [PlacedSpan(replace(kv, queries=queries), 0, 0)])
            adapter.compute(held, IDS, adapter.rows(ALL), projected=ALL[STORED:])
    expected, got, other = seen
    close(got, expected)
    assert not torch.allclose(other[:, :STORED], expected[:, :STORED], atol=1e-2)
    close(other[:, STORED:], expected[:, STORED:])


def test_rows_without_queries_are_refused_with_their_number():
    adapter = quiet_adapter("llama")
    _, kv_cache = whole(adapter)
    for spans in (
        [PlacedSpan(replace(adapter.extract_chunk_kv(kv_cache, IDS, 0, STORED), queries=None), 0, 0)],
        [],
    ):
        with pytest.raises(InvalidRequest, match=f"{STORED} of {N} rows are neither projected nor stored"):
            adapter.compute(adapter.new_cache(N, spans), IDS, adapter.rows(ALL), projected=ALL[STORED:])


def test_the_model_is_left_as_it_was_and_other_threads_are_not_affected():
    adapter = quiet_adapter("llama")
    logits, kv_cache = whole(adapter)
    beside = []

    class Beside:
        """Runs the model in another thread, with as many rows, in the middle of the pass."""

        def on_layer(self, queries):
            thread = threading.Thread(target=lambda: beside.append(plain()))
            thread.start()
            thread.join()

    def plain():
        with torch.no_grad():
            return adapter.model(torch.tensor([IDS]), use_cache=False, logits_to_keep=1).logits[:, -1]

    plan = adapter.rows(ALL)
    plan.hooks.append(Beside())
    close(adapter.compute(placed(adapter, kv_cache, 0, STORED), IDS, plan, projected=ALL[STORED:]), logits)
    assert len(beside) == adapter.geometry.layers
    for each in beside:
        close(each, logits)

    class Broken:
        def on_layer(self, queries):
            raise RuntimeError("broken")

    plan = adapter.rows(ALL)
    plan.hooks.append(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        adapter.compute(placed(adapter, kv_cache, 0, STORED), IDS, plan, projected=ALL[STORED:])
    for modules in adapter.projections:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
