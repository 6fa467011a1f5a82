"""Passes that drop rows between layers, against plain transformers writing fewer rows per layer."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.testing import FAMILIES
from kvweave_lab.recipes.row_schedule import scheduled
from support.oracle import partial_prefill, stock
from support.prompts import (
    APE_IDS,
    APE_N,
    CONTEXT,
    IDS,
    N,
    ape_kv_cache,
    ape_plan,
    held,
    quiet_adapter,
    stale_kv_cache,
)

ALL = torch.arange(N)
SCHEDULE = (ALL, torch.cat([ALL[22:36], ALL[40:]]), torch.cat([ALL[25:29], ALL[45:51], ALL[-1:]]))
TOLERANCE = 2e-4  # as in the parity tests


@pytest.fixture(scope="module", params=FAMILIES)
def adapter(request):
    return quiet_adapter(request.param)


class Schedule:
    """Keeps given rows at given layers."""

    def __init__(self, *schedule):
        self.schedule = schedule
        self.asked = []

    def rows_for(self, layer):
        self.asked.append(layer)
        return self.schedule[layer] if layer < len(self.schedule) else None


def compute(adapter, kv_cache, plan, schedule, ids=IDS):
    return adapter.compute(kv_cache, ids, scheduled(plan, kv_cache, schedule))


class Seen:
    """Records the rows of each layer."""

    def __init__(self):
        self.rows = []

    def on_layer(self, layer):
        self.rows.append(layer.rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schedule_equals_writing_only_the_scheduled_rows(family):
    """Rows dropped at a layer keep their stale K,V from there on; no other row reads their hidden states."""
    adapter = quiet_adapter(family)
    kv_cache, placed = stale_kv_cache(adapter), stale_kv_cache(adapter)
    adapter.compute(placed, IDS, adapter.rows(ALL[-1:]))
    before = held(placed, N)
    got = compute(adapter, kv_cache, adapter.rows(ALL), Schedule(*SCHEDULE))
    adapter.rotation.reset_lengths()
    plain = stock(adapter.model)
    expected = partial_prefill(plain, IDS, ALL, before, written=list(SCHEDULE))
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
    for rows, (keys, values), (old_keys, old_values) in zip(SCHEDULE, held(kv_cache, N), before, strict=True):
        dropped = ~torch.isin(ALL, rows)
        assert torch.equal(keys[:, :, dropped], old_keys[:, :, dropped])
        assert torch.equal(values[:, :, dropped], old_values[:, :, dropped])
        assert not torch.equal(keys[:, :, rows], old_keys[:, :, rows])


def test_a_schedule_that_keeps_all_rows_changes_no_bit(adapter):
    plan = adapter.rows(ALL[20:])
    expected = adapter.compute(stale_kv_cache(adapter), IDS, adapter.rows(ALL[20:]))
    schedule = Schedule(None, ALL[20:], None)
    assert torch.equal(compute(adapter, stale_kv_cache(adapter), plan, schedule), expected)
    assert schedule.asked == list(range(adapter.geometry.layers))


def test_dropping_rows_at_the_first_layer_equals_a_pass_over_the_others(adapter):
    rows = SCHEDULE[1]
    dropped, alone = stale_kv_cache(adapter), stale_kv_cache(adapter)
    got = compute(adapter, dropped, adapter.rows(ALL), Schedule(rows))
    expected = adapter.compute(alone, IDS, adapter.rows(rows))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(held(dropped, N), held(alone, N), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_hooks_see_the_rows_that_still_run():
    adapter = quiet_adapter("gemma2")
    seen, plan = Seen(), adapter.rows(ALL)
    plan.hooks.append(seen)
    compute(adapter, stale_kv_cache(adapter), plan, Schedule(*SCHEDULE))
    assert all(torch.equal(a, b) for a, b in zip(seen.rows, SCHEDULE, strict=True))
    assert torch.equal(plan.rows, ALL)


def test_rows_may_be_chosen_by_the_values_of_the_previous_layer():
    adapter = quiet_adapter("llama")
    placed = stale_kv_cache(adapter)
    adapter.compute(placed, IDS, adapter.rows(ALL[-1:]))
    stale = [values for _, values in held(placed, N)]

    class Furthest:
        """Keeps the question and the stored rows whose values deviated most at the layer before."""

        def __init__(self):
            self.rows = ALL
            self.sizes = []

        def on_layer(self, queries):
            stored = queries.rows[queries.rows < 40]
            deviation = (queries.values - stale[queries.layer])[0].square().sum(dim=(0, 2))[stored]
            best = stored[deviation.topk(len(deviation) // 2).indices]
            self.rows = torch.cat([best, ALL[40:]]).sort().values
            self.sizes.append(len(queries.rows))

        def rows_for(self, layer):
            return self.rows

    chooser, plan = Furthest(), adapter.rows(ALL)
    plan.hooks.append(chooser)
    compute(adapter, stale_kv_cache(adapter), plan, chooser)
    assert chooser.sizes == [60, 40, 30]


def test_rows_with_grouped_attention_can_be_dropped_too():
    adapter = quiet_adapter("mistral-sliding")
    rows = torch.arange(CONTEXT[0], APE_N)
    some = torch.cat([rows[3:9], rows[-5:]])
    plan = ape_plan(adapter, rows)
    got = compute(adapter, ape_kv_cache(adapter), plan, Schedule(some), ids=APE_IDS)
    expected = adapter.compute(ape_kv_cache(adapter), APE_IDS, ape_plan(adapter, some))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rows",
    [ALL[:5], ALL[:0], torch.tensor([5, 4, 59]), torch.tensor([5, 5, 59]), torch.tensor([2, 59])],
    ids=["without the last", "none", "descending", "twice", "not running"],
)
def test_invalid_rows_are_refused_and_the_model_is_as_before(rows):
    adapter = quiet_adapter("llama")
    kv_cache = stale_kv_cache(adapter)
    with pytest.raises(InvalidRequest, match="layer 1 cannot continue"):
        compute(adapter, kv_cache, adapter.rows(ALL), Schedule(ALL[3:], rows))
    expected = adapter.compute(adapter.new_cache(N), IDS, adapter.rows(ALL))
    assert torch.equal(adapter.compute(kv_cache, IDS, adapter.rows(ALL)), expected)


def test_other_calls_of_the_model_are_not_affected_by_a_scheduled_pass():
    adapter = quiet_adapter("llama")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        expected = adapter.model(ids).logits

    class Meanwhile(Schedule):
        def rows_for(self, layer):
            if layer == 1:
                found.append(adapter.model(ids).logits)
            return super().rows_for(layer)

    found = []
    compute(adapter, stale_kv_cache(adapter), adapter.rows(ALL), Meanwhile(*SCHEDULE))
    assert torch.equal(found[0], expected)
