import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kvstore.eviction import (
    HALF_LIFE_S,
    EvictionRow,
    after_retrievals,
    choose_victims,
    eviction_score,
    frequency,
)

NOW_S = 1.8e9

rows_of = st.lists(
    st.builds(
        EvictionRow, key=st.text("abcdef", min_size=1), bytes=st.integers(0, 100), score=st.floats(-5, 5)
    ),
    unique_by=lambda row: row.key,
)


@settings(deadline=None)
@given(rows_of, st.integers(-10, 2000))
def test_victims_have_the_lowest_scores_and_are_no_more_than_needed(
    rows: list[EvictionRow], needed: int
) -> None:
    victims = choose_victims(rows, needed)
    kept = [row for row in rows if row not in victims]
    freed = sum(row.bytes for row in victims)
    assert freed >= needed or not kept
    assert not victims or freed - victims[-1].bytes < needed
    assert all(out.score <= stays.score for out in victims for stays in kept)


def test_the_frequency_is_the_sum_of_retrievals_each_halved_with_every_half_life() -> None:
    """The definition, written out: against the frequency that the score gives after a random history."""
    chance = random.Random(3)
    times = sorted(NOW_S - chance.uniform(0, 10) * HALF_LIFE_S for _ in range(30))
    at = eviction_score(1, 100, 5000, times[0])
    for time_s in times[1:]:
        at = after_retrievals(at, 1, 100, 5000, time_s)
    defined = sum(0.5 ** ((NOW_S - time_s) / HALF_LIFE_S) for time_s in times)
    assert frequency(at, 100, 5000, NOW_S) == pytest.approx(defined, rel=1e-6)


def test_frequent_recent_costly_and_small_entries_score_higher() -> None:
    plain = eviction_score(2, 500, 10**6, NOW_S)
    assert eviction_score(3, 500, 10**6, NOW_S) > plain
    assert eviction_score(2, 500, 10**6, NOW_S + 1) > plain
    assert eviction_score(2, 600, 10**6, NOW_S) > plain
    assert eviction_score(2, 500, 10**6 // 2, NOW_S) > plain
    assert (
        eviction_score(2, 500, 10**6, 0)
        > eviction_score(1, 500, 10**6, 0)
        > eviction_score(1, 500, 2 * 10**6, 0)
    )


def test_the_order_of_two_entries_does_not_change_with_time() -> None:
    old_but_hot, new = (
        eviction_score(8, 500, 10**6, NOW_S),
        eviction_score(1, 500, 10**6, NOW_S + 2 * HALF_LIFE_S),
    )
    assert old_but_hot > new  # 8 halved twice is 2
    assert eviction_score(1, 500, 10**6, NOW_S + 4 * HALF_LIFE_S) > old_but_hot


@settings(deadline=None)
@given(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(0, 10**5), st.integers(0, 10**12))
def test_a_retrieval_never_lowers_the_score_even_if_the_clock_jumps(
    ago_s: float, count: int, tokens: int, size: int
) -> None:
    before = eviction_score(1, tokens, size, NOW_S)
    assert after_retrievals(before, count, tokens, size, NOW_S - ago_s) >= before
    assert math.isfinite(after_retrievals(before, count, tokens, size, 0.0))
