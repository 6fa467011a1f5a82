import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kvstore.eviction import HALF_LIFE_S
from kvweave.kvstore.tiers.leases import Pins
from kvweave.kvstore.tiers.memory import Residents

NOW_S = 1.8e9


def residents(limit_bytes: int = 100, pins: Pins | None = None) -> Residents[str]:
    return Residents(limit_bytes, (pins or Pins()).in_use)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 60), st.floats(-5, 5)), max_size=30))
def test_the_cap_holds_whatever_comes(offers: list[tuple[str, int, float]]) -> None:
    held = residents()
    for key, size, standing in offers:
        held.admit(key, key, size, standing)
        assert held.used_bytes == sum(held.sizes().values()) <= 100


def test_a_newcomer_gets_in_only_where_it_is_worth_more_than_those_that_must_go() -> None:
    held = residents()
    assert held.admit("cold", "1", 50, 1.0) == {}
    assert held.admit("hot", "2", 50, 5.0) == {}
    assert not held.admits("new", 50, 0.5)
    assert held.admit("new", "3", 50, 0.5) is None
    assert held.admit("new", "3", 50, 1.1) is None  # hardly worth more: copying costs too
    assert held.admit("new", "3", 60, 3.0) is None  # the hot one would have to go as well
    gone = held.admit("new", "3", 50, 3.0)
    assert gone is not None
    assert [(key, one.held, one.standing) for key, one in gone.items()] == [("cold", "1", 1.0)]
    assert held.sizes() == {"hot": 50, "new": 50}
    assert held.admit("huge", "4", 101, 9.0) is None
    assert held.sizes() == {"hot": 50, "new": 50}


def test_what_is_in_use_does_not_go_neither_for_room_nor_for_a_lower_cap() -> None:
    pins = Pins()
    held = residents(pins=pins)
    held.admit("used", "1", 50, 1.0)
    held.admit("idle", "2", 50, 2.0)
    pins.pin(["used"])
    gone = held.admit("new", "3", 50, 3.0)
    assert gone is not None
    assert gone.keys() == {"idle"}
    assert held.admit("another", "4", 60, 9.0) is None
    assert held.set_limit(0).keys() == {"new"}
    assert held.get("used") == "1"
    pins.unpin(["used"])
    assert held.set_limit(0).keys() == {"used"}
    assert held.used_bytes == len(held) == 0


def test_retrievals_raise_the_standing_and_age_with_time() -> None:
    held = residents()
    for key in ("early", "late"):
        held.admit(key, key, 50, NOW_S / HALF_LIFE_S)
    for _ in range(3):
        held.asked("early", 10, NOW_S)
    held.asked("late", 10, NOW_S + 4 * HALF_LIFE_S)
    held.asked("never seen", 10, NOW_S)
    held.set_limit(50)
    assert held.sizes() == {"late": 50}


def test_replacing_and_dropping_keep_count() -> None:
    held = residents()
    held.admit("a", "old", 80, 1.0)
    assert held.admit("a", "new", 90, 1.0) == {}
    assert (held.get("a"), held.used_bytes) == ("new", 90)
    assert held.admit("a", "too large", 101, 9.0) is None
    assert (held.get("a"), held.used_bytes) == ("new", 90)
    held.drop(["a", "b"])
    assert held.get("a") is None
    assert held.used_bytes == 0


@pytest.mark.parametrize("times", [1, 3])
def test_a_pin_holds_until_the_last_request_lets_go(times: int) -> None:
    pins = Pins()
    for _ in range(times):
        pins.pin(["a"])
    for _ in range(times):
        assert pins.in_use() == {"a"}
        pins.unpin(["a"])
    assert pins.in_use() == frozenset()
