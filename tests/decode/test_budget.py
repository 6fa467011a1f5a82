"""Entry budgets, and which settings are rejected."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.decode.settings import MIN_ENTRIES, ClusterSettings, DiskSettings, OffloadSettings
from kvweave.decode.strategy import token_budget
from kvweave.errors import InvalidRequest


@given(
    budget=st.one_of(st.floats(0.001, 1), st.integers(12, 5000)),
    stored=st.integers(1, 10**5),
    window=st.integers(1, 200),
)
def test_sinks_and_window_leave_budget_for_retrieval(budget, stored, window):
    settings = OffloadSettings(budget, window=window)
    granted = token_budget(settings, stored)
    always = settings.sinks + granted.window
    assert 1 <= granted.window <= window
    assert always < granted.total
    assert granted.remaining(always) == granted.total - always
    if budget <= 1:
        assert granted.total >= min(budget * stored, stored)
        assert granted.total <= max(budget * stored + 1, settings.sinks + MIN_ENTRIES)
    else:
        assert granted.total == budget


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_budget": 0}, r"kv_budget is 0; it is a share"),
        ({"kv_budget": math.nan}, r"kv_budget is nan"),
        ({"kv_budget": math.inf}, r"kv_budget is inf"),
        ({"storage": "int3"}, r"storage is 'int3'; it is one of 'exact'"),
        ({"kv_budget": 40.5}, r"40\.5; above 1 it is a number of entries, which must be whole"),
        ({"kv_budget": 9}, r"kv_budget is 9 entries; with 4 sinks at least 12"),
        ({"sinks": -1}, r"sinks is -1"),
        ({"window": 0}, r"window is 0"),
        ({"resident_bytes": 0}, r"resident_bytes is 0"),
        ({"disk": DiskSettings(tail_pages=0)}, r"tail_pages is 0"),
        ({"disk": DiskSettings(readers=0)}, r"readers is 0"),
        ({"disk": DiskSettings(gap_pages=-1)}, r"gap_pages is -1"),
        ({"disk": DiskSettings(page_bytes=0)}, r"page_bytes is 0"),
        ({"disk": DiskSettings(page_bytes=1001)}, r"page_bytes is 1001; .* multiple of 8"),
    ],
)
def test_invalid_settings_are_explained(changes, message):
    with pytest.raises(InvalidRequest, match=message):
        OffloadSettings(**changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((9, 8), r"clusters of 9 entries on average and 8"),
        ((1, 1), r"max_entries is 1; a cluster holds at least 2"),
    ],
)
def test_invalid_sizes_of_clusters_are_explained(sizes, message):
    with pytest.raises(InvalidRequest, match=message):
        ClusterSettings(*sizes)
