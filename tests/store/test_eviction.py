from hypothesis import given
from hypothesis import strategies as st

from kvweave.store.eviction import EvictionRow, choose_victims

ROWS = st.lists(
    st.builds(
        EvictionRow,
        st.uuids().map(str),
        st.integers(1, 9),
        st.integers(0, 3),
        st.floats(0, 10, allow_nan=False),
    )
)


def test_least_used_goes_first_then_longest_unused() -> None:
    rows = [
        EvictionRow("often", 1, 5, 0.0),
        EvictionRow("once, lately", 1, 1, 9.0),
        EvictionRow("once, long ago", 1, 1, 2.0),
        EvictionRow("never", 1, 0, 99.0),
    ]
    assert [row.key for row in choose_victims(rows, 3)] == ["never", "once, long ago", "once, lately"]


@given(ROWS, st.integers(-5, 60))
def test_frees_enough_and_not_one_entry_more(rows: list[EvictionRow], bytes_to_free: int) -> None:
    victims = choose_victims(rows, bytes_to_free)
    kept = [row for row in rows if row not in victims]
    freed = sum(row.bytes for row in victims)
    assert freed >= bytes_to_free or not kept
    assert freed - sum(row.bytes for row in victims[-1:]) < max(bytes_to_free, 1)
    assert all(
        (gone.uses, gone.last_used) <= (stays.uses, stays.last_used) for gone in victims for stays in kept
    )
