"""The time that preparation still takes is estimated from the recent speed of the run itself."""

import pytest

from kvweave.documents.chunk_preparation import RemainingTime


def measured(seconds):
    """A run that took so long for each of its chunks of 100 tokens."""
    found = RemainingTime()
    for each in seconds:
        found.add("isolated", 100, each)
    return found


def test_nothing_is_estimated_before_every_kind_was_measured():
    found = measured([1.0, 1.0, 1.0])
    assert found.estimate({"isolated": 500}) is None  # the first one does not count
    found.add("isolated", 100, 1.0)
    assert found.estimate({"isolated": 500}) == pytest.approx((5.0, 5.0))
    assert found.estimate({"isolated": 500, "woven": 500}) is None
    assert found.estimate({}) == (0.0, 0.0)


@pytest.mark.parametrize("slow", range(6))
def test_one_slow_chunk_does_not_multiply(slow):
    """Of 6 chunks, one takes a hundred times as long as the others: the first of the process, or beside other programs."""
    seconds = [100.0 if number == slow else 1.0 for number in range(6)]
    assert measured(seconds).estimate({"isolated": 10_000}) == pytest.approx((100.0, 100.0))


def test_a_machine_that_is_idle_again_is_noticed():
    found = measured([14.0] * 20)
    assert found.estimate({"isolated": 1000}) == pytest.approx((140.0, 140.0))
    for _ in range(6):
        found.add("isolated", 100, 1.0)
    assert found.estimate({"isolated": 1000}) == pytest.approx((10.0, 140.0))  # a range while it is not clear
    for _ in range(6):
        found.add("isolated", 100, 1.0)
    assert found.estimate({"isolated": 1000}) == pytest.approx((10.0, 10.0))


def test_kinds_have_their_own_speed_and_add_up():
    found = measured([1.0] * 5)
    for _ in range(3):
        found.add("woven", 50, 2.0)
    assert found.estimate({"isolated": 300, "woven": 100}) == pytest.approx((7.0, 7.0))
