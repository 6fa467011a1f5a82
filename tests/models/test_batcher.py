"""Passes of many threads over one model, for every family: together they give what each gives alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvweave.cancellation import cancellable
from kvweave.errors import Cancelled
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe, StopAtLayer
from kvweave.models.shared_spans import SharedSpanCache
from kvweave.testing import FAMILIES
from support.prompts import (
    APE_IDS,
    APE_ROWS,
    IDS,
    STORED,
    N,
    ape_kv_cache,
    ape_plan,
    close,
    encoded,
    quiet_adapter,
)


@pytest.fixture
def many():
    adapter = quiet_adapter("llama")
    batcher = adapter.serve_many(pass_s=0.0)  # the smallest pieces
    yield adapter
    batcher.close()


def entries(adapter):
    """Return stored KV of a prefix and a chunk, as a store returns it."""
    return [
        replace(encoded(adapter, IDS[:20]), entry="prefix"),
        replace(encoded(adapter, IDS[20:STORED]), entry="chunk"),
    ]


def selected(shift):
    return torch.cat([torch.arange(20 + shift, 40, 3), torch.arange(40, N)])


def start(adapter, stored, shift):
    """Return a computed cache over stored KV and its last logits; `shift` chooses the rows."""
    spans = [PlacedSpan(kv, at, at) for kv, at in zip(stored, (0, 20), strict=True)]
    kv_cache = adapter.new_cache(N, spans)
    return kv_cache, adapter.compute(kv_cache, IDS, adapter.rows(selected(shift)), capture=True)


def request(adapter, stored, number):
    """Run a request of one of three kinds; return its logits, its captured KV, and those of two replies."""
    if number % 3 == 0:
        kv_cache = adapter.new_cache(33 + number)
        ids = IDS[: 33 + number]
        logits = adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))), capture=True)
        rows = torch.arange(len(ids))
    elif number % 3 == 1:
        (kv_cache, logits), rows = start(adapter, stored, number % 2), selected(number % 2)
    else:
        kv_cache = ape_kv_cache(adapter)
        logits = adapter.compute(kv_cache, APE_IDS, ape_plan(adapter, APE_ROWS), capture=True)
        rows = APE_ROWS
    captured = kv_cache.capture.kv[:, :, :, rows].clone()
    if not kv_cache.plain:
        return [logits, captured]
    return [logits, captured, adapter.step(kv_cache, 5), adapter.verify_draft(kv_cache, [7, 8, 9])]


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_many_threads_equal_passes_alone(family):
    alone = quiet_adapter(family)
    expected = [request(alone, entries(alone), number) for number in range(6)]
    together = quiet_adapter(family)
    stored = entries(together)
    batcher = together.serve_many()
    barrier = threading.Barrier(6)

    def run(number):
        barrier.wait()
        return request(together, stored, number)

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(run, range(6)))
    batcher.close()
    for got, own in zip(found, expected, strict=True):
        for one, other in zip(got, own, strict=True):
            close(one, other)
    assert batcher.stats.most_requests > 1


def test_a_long_prompt_runs_in_pieces_between_the_steps_of_others(many):
    kv_cache, _ = start(many, entries(many), 0)
    long = torch.randint(3, 260, (900,), generator=torch.Generator().manual_seed(4)).tolist()
    reference = quiet_adapter("llama")
    expected = reference.compute(reference.new_cache(900), long, reference.rows(torch.arange(900)))
    shapes = []
    many.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with ThreadPoolExecutor(2) as threads:
        prompt = threads.submit(many.compute, many.new_cache(900), long, many.rows(torch.arange(900)))
        steps = 0
        while not prompt.done():
            many.step(kv_cache, 5)
            steps += 1
        close(prompt.result(), expected)
    assert steps >= 3
    assert max(shapes) < 900


def test_shared_spans_equal_own_copies_whatever_is_read_of_them(many):
    stored = entries(many)
    shared, _ = start(many, stored, 0)
    assert isinstance(shared, SharedSpanCache)
    plain = quiet_adapter("llama")
    own, _ = start(plain, stored, 0)
    like = torch.empty(1, 2, 1, plain.geometry.head_width)
    for one, other in zip(shared.layer_kv(1, like), own.layer_kv(1, like), strict=True):
        close(one, other)
    probes = AttentionProbe(torch.arange(50, N)), AttentionProbe(torch.arange(50, N))
    for adapter, kv_cache, probe in zip((many, plain), (shared, own), probes, strict=True):
        plan = adapter.rows(torch.arange(45, N))
        plan.hooks += [probe, StopAtLayer(2)]
        adapter.run_partial(kv_cache, IDS, plan)
    close(probes[0].weights, probes[1].weights)
    inputs = torch.tensor([[IDS[-1]]])
    shared.truncate_prompt(N - 1)
    own.truncate_prompt(N - 1)
    logits = [
        adapter.model(input_ids=inputs, past_key_values=kv_cache, position_ids=torch.tensor([[N - 1]])).logits
        for adapter, kv_cache in ((many, shared), (plain, own))
    ]
    close(*logits)


def test_an_error_of_one_request_is_not_that_of_the_others(many):
    class Breaks:
        def on_layer(self, queries):
            if queries.layer == 1:
                raise ValueError("broken hook")

    expected = request(quiet_adapter("llama"), entries(many), 0)
    barrier = threading.Barrier(4)

    def run(number):
        barrier.wait()
        if number:
            return request(many, (), 0)
        plan = many.rows(torch.arange(33))
        plan.hooks.append(Breaks())
        with pytest.raises(ValueError, match="broken hook"):
            many.compute(many.new_cache(33), IDS[:33], plan)
        return expected

    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(run, range(4)):
            for one, other in zip(got, expected, strict=True):
                close(one, other)


def test_a_cancelled_request_ends_between_two_pieces(many):
    cancelled = threading.Event()
    calls = []

    def count(*_):
        calls.append(1)
        cancelled.set()

    many.model.register_forward_pre_hook(count)
    ids = torch.randint(3, 260, (2000,)).tolist()
    with cancellable(cancelled.is_set), pytest.raises(Cancelled):
        many.compute(many.new_cache(2000), ids, many.rows(torch.arange(2000)))
    assert len(calls) == 1
    assert many.batcher.waiting == 0


def test_passes_that_wait_when_it_closes_are_cancelled():
    adapter = quiet_adapter("llama")
    batcher = adapter.serve_many()
    batcher.close()
    with pytest.raises(Cancelled, match="shutting down"):
        adapter.compute(adapter.new_cache(8), IDS[:8], adapter.rows(torch.arange(8)))
