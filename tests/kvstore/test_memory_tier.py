import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kvstore.eviction import HALF_LIFE_S
from kvweave.kvstore.tiers.leases import Pins
from kvweave.kvstore.tiers.memory import MemoryEntry, MemoryTier

NOW_S = 1.8e9


class Tier(MemoryTier[str]):
    """A tier of words; `evicted` has what it evicted last."""

    def __init__(self, pins: Pins | None = None) -> None:
        self.evicted: dict[str, MemoryEntry[str]] = {}
        super().__init__(100, (pins or Pins()).in_use, self.evicted.update)

    def offer(self, key: str, word: str, size_bytes: int, score: float) -> dict[str, MemoryEntry[str]] | None:
        """Return the entries evicted for a new one; None if it was not accepted."""
        self.evicted.clear()
        accepted = self.hold(key, word, size_bytes, score)
        return dict(self.evicted) if accepted else None

    def limited(self, limit_bytes: int) -> dict[str, MemoryEntry[str]]:
        """Return the entries evicted for a new cap."""
        self.evicted.clear()
        self.set_limit(limit_bytes)
        return dict(self.evicted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 60), st.floats(-5, 5)), max_size=30))
def test_the_cap_holds_for_any_sequence_of_entries(offers: list[tuple[str, int, float]]) -> None:
    tier = Tier()
    for key, size, score in offers:
        tier.hold(key, key, size, score)
        assert tier.used_bytes == sum(tier.sizes().values()) <= 100


def test_a_new_entry_is_accepted_only_if_its_score_beats_those_of_its_victims() -> None:
    tier = Tier()
    assert tier.offer("cold", "1", 50, 1.0) == {}
    assert tier.offer("hot", "2", 50, 5.0) == {}
    assert not tier.would_hold("new", 50, 0.5)
    assert tier.offer("new", "3", 50, 0.5) is None
    assert tier.offer("new", "3", 50, 1.1) is None  # hardly higher: copying costs too
    assert tier.offer("new", "3", 60, 3.0) is None  # the hot one would have to go as well
    evicted = tier.offer("new", "3", 50, 3.0)
    assert evicted is not None
    assert [(key, one.held, one.score) for key, one in evicted.items()] == [("cold", "1", 1.0)]
    assert tier.sizes() == {"hot": 50, "new": 50}
    assert tier.offer("huge", "4", 101, 9.0) is None
    assert tier.sizes() == {"hot": 50, "new": 50}


def test_an_entry_in_use_is_evicted_neither_for_another_nor_for_a_lower_cap() -> None:
    pins = Pins()
    tier = Tier(pins)
    tier.hold("used", "1", 50, 1.0)
    tier.hold("idle", "2", 50, 2.0)
    pins.pin(["used"])
    evicted = tier.offer("new", "3", 50, 3.0)
    assert evicted is not None
    assert evicted.keys() == {"idle"}
    assert tier.offer("another", "4", 60, 9.0) is None
    assert tier.limited(0).keys() == {"new"}
    assert tier.peek("used") == "1"
    pins.unpin(["used"])
    assert tier.limited(0).keys() == {"used"}
    assert tier.used_bytes == len(tier) == 0


def test_hits_raise_the_score_and_age_with_time() -> None:
    tier = Tier()
    for key in ("early", "late"):
        tier.hold(key, key, 50, NOW_S / HALF_LIFE_S)
    for _ in range(3):
        tier.record_hit("early", 10, NOW_S)
    tier.record_hit("late", 10, NOW_S + 4 * HALF_LIFE_S)
    tier.record_hit("never seen", 10, NOW_S)
    tier.set_limit(50)
    assert tier.sizes() == {"late": 50}


def test_replacing_and_dropping_keep_the_size_right() -> None:
    tier = Tier()
    tier.hold("a", "old", 80, 1.0)
    assert tier.offer("a", "new", 90, 1.0) == {}
    assert (tier.peek("a"), tier.used_bytes) == ("new", 90)
    assert tier.offer("a", "too large", 101, 9.0) is None
    assert (tier.peek("a"), tier.used_bytes) == ("new", 90)
    tier.drop(["a", "b"])
    assert tier.peek("a") is None
    assert tier.used_bytes == 0


@pytest.mark.parametrize("times", [1, 3])
def test_a_pin_holds_until_the_last_request_releases_it(times: int) -> None:
    pins = Pins()
    for _ in range(times):
        pins.pin(["a"])
    for _ in range(times):
        assert pins.in_use() == {"a"}
        pins.unpin(["a"])
    assert pins.in_use() == frozenset()
