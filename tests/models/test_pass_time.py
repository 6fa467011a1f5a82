"""What a pass of so many rows takes, and how many rows fit a time."""

import pytest

from kvweave.models.pass_schedule import MOST_EFFICIENT_ROWS, PassTime


def learned(passes):
    known = PassTime()
    for rows, seconds in passes:
        known.record(rows, seconds)
    return known


def test_rows_fit_the_time_left_beside_the_fixed_one():
    known = learned((rows, 0.2 + 0.002 * rows) for rows in (64, 128, 256, 300, 64))
    assert known.rows_in(0.5) == pytest.approx(150, abs=2)
    assert known.rows_in(1.0) == pytest.approx(400, abs=2)


def test_a_time_that_the_fixed_part_fills_gets_rows_for_as_long_again():
    known = learned((rows, 0.2 + 0.002 * rows) for rows in (64, 128, 256))
    assert known.rows_in(0.1) == pytest.approx(100, abs=2)
    assert learned((rows, 5 + 0.001 * rows) for rows in (64, 128)).rows_in(0.1) == MOST_EFFICIENT_ROWS


def test_passes_of_one_size_tell_nothing_of_a_fixed_part():
    assert learned([(100, 0.5)] * 4).rows_in(1.0) == pytest.approx(200, abs=1)
    assert learned([]).rows_in(1.0) is None
    assert learned([]).rows_per_s is None
    assert learned([(100, 0.5), (200, 1.0)]).rows_per_s == pytest.approx(200)


def test_small_pieces_do_not_make_the_next_ones_smaller():
    """A rate alone would: small passes are mostly fixed time, so they seem to need still smaller ones."""
    known = PassTime()
    rows = 256
    for _ in range(50):
        known.record(rows, 0.2 + 0.002 * rows)
        rows = max(64, known.rows_in(0.5))
    assert rows == pytest.approx(150, abs=40)
