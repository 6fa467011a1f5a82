"""Several requests packed in one call of the model: N together equal N alone."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.hooks import AttentionProbe
from support.prompts import (
    APE_IDS,
    APE_ROWS,
    IDS,
    N,
    ape_kv_cache,
    ape_plan,
    close,
    computed_ape_kv_cache,
    held,
    quiet_adapter,
    stale_kv_cache,
)

LONG = torch.randint(3, 260, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def requests(adapter):
    """Return requests of different kinds: selected rows over stale KV, a full prefill, and overlapping chunks."""
    selected = torch.cat([torch.arange(20, 40, 3), torch.arange(40, N)])
    return [
        (stale_kv_cache(adapter), IDS, adapter.rows(selected)),
        (adapter.new_cache(33), IDS[:33], adapter.rows(torch.arange(33))),
        (ape_kv_cache(adapter), APE_IDS, ape_plan(adapter, APE_ROWS)),
    ]


class Calls:
    """Records the input shape of every call of a model."""

    def __init__(self, adapter):
        self.shapes = []
        adapter.model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.shapes.append(tuple(kwargs["input_ids"].shape))


def test_a_packed_pass_equals_passes_alone(adapter):
    alone, packed = requests(adapter), requests(adapter)
    expected = [adapter.compute(*request) for request in alone]
    got = adapter.compute_packed(packed)
    assert len(got) == len(expected)
    for one, other, (kv_cache, ids, _), (reference, _, _) in zip(got, expected, packed, alone, strict=True):
        assert one.shape == other.shape
        close(one, other)
        close(held(kv_cache, len(ids)), held(reference, len(ids)))


def test_packed_steps_equal_steps_alone(adapter):
    def started():
        kv_caches = [kv_cache for kv_cache, _, _ in requests(adapter)]
        for kv_cache, request in zip(kv_caches, requests(adapter), strict=True):
            adapter.compute(kv_cache, *request[1:])
        return [*kv_caches, computed_ape_kv_cache(adapter)[0]]

    alone, packed = started(), started()
    for tokens in ([4, 5, 6, 7], [14, 15, 16, 17]):
        expected = [adapter.step(kv_cache, token) for kv_cache, token in zip(alone, tokens, strict=True)]
        got = adapter.step_packed(list(zip(packed, tokens, strict=True)))
        for one, other in zip(got, expected, strict=True):
            assert one.shape == other.shape
            close(one, other)


class Queries:
    """Records the queries of every layer."""

    def __init__(self):
        self.seen = []

    def on_layer(self, queries):
        self.seen.append(queries.query)


def test_hooks_see_their_own_request(adapter):
    def with_hooks():
        made = requests(adapter)
        hooks = [AttentionProbe(plan.rows[-3:]) for _, _, plan in made], Queries()
        for (_, _, plan), probe in zip(made, hooks[0], strict=True):
            plan.hooks.append(probe)
        made[1][2].hooks.append(hooks[1])
        return made, *hooks

    alone, probes_alone, queries_alone = with_hooks()
    for request in alone:
        adapter.compute(*request)
    packed, probes, queries = with_hooks()
    adapter.compute_packed(packed)
    for one, other in zip(probes, probes_alone, strict=True):
        close(one.weights, other.weights)
    for one, other in zip(queries.seen, queries_alone.seen, strict=True):
        close(one, other)


def test_any_number_of_requests_takes_one_call_without_padding():
    adapter = quiet_adapter("llama")
    packed = requests(adapter)
    calls = Calls(adapter)
    adapter.compute_packed(packed)
    adapter.step_packed([(kv_cache, 9) for kv_cache, _, _ in packed])
    assert calls.shapes == [(1, sum(len(plan.rows) for _, _, plan in packed)), (1, 3)]
    assert adapter.compute_packed([]) == []


@pytest.mark.parametrize(("family", "calls_made"), [("llama", 1), ("llama-dynamic", 3), ("phi3-longrope", 2)])
def test_requests_with_other_frequencies_run_in_separate_calls(family, calls_made):
    adapter = quiet_adapter(family)
    calls = Calls(adapter)

    def made():
        lengths = (100, 40, 70, 30)
        return [(adapter.new_cache(n), LONG[:n], adapter.rows(torch.arange(n))) for n in lengths]

    alone, packed = made(), made()
    expected = [adapter.compute(*request) for request in alone]
    calls.shapes.clear()
    for one, other in zip(adapter.compute_packed(packed), expected, strict=True):
        close(one, other)
    assert len(calls.shapes) == calls_made
    expected = [adapter.step(kv_cache, 9) for kv_cache, _, _ in alone]
    for one, other in zip(adapter.step_packed([(c, 9) for c, _, _ in packed]), expected, strict=True):
        close(one, other)


def test_a_kv_cache_that_appears_twice_is_refused_and_stays_usable():
    adapter = quiet_adapter("llama")
    kv_cache = stale_kv_cache(adapter)
    request = kv_cache, IDS, adapter.rows(torch.arange(40, N))
    with pytest.raises(InvalidRequest, match="a cache appears twice"):
        adapter.compute_packed([request, request])
    expected = adapter.compute(stale_kv_cache(adapter), IDS, adapter.rows(torch.arange(40, N)))
    assert torch.equal(adapter.compute(*request), expected)
