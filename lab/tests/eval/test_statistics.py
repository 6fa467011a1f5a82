"""Intervals: what they hold, that arrays stay paired, and that tasks are resampled apart."""

import math

import numpy as np
import pytest
import torch

from kvweave_lab.statistics import (
    Scores,
    interval_of_means,
    interval_over_tasks,
    kl_divergence,
    ratio_over_tasks,
    unpaired_over_tasks,
)


def interval(values, **more):
    """Of a single task."""
    return interval_over_tasks([values], **more)


def ratio_interval(score, full, reuse):
    """Of a single task."""
    return ratio_over_tasks([Scores(score, full, reuse)])


def test_the_interval_of_a_mean_is_that_of_its_resampled_means():
    """Four values with a single one: resampled sums are binomial(4, ¼), of which 2.5 % is 0 and 97.5 % is 3."""
    estimate = interval([0, 1, 0, 0])
    assert (estimate.value, estimate.low, estimate.high) == (0.25, 0.0, 0.75)


def test_the_interval_of_many_values_is_the_normal_one():
    estimate = interval([0.0, 1.0] * 200, resamples=5000)
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.006)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.006)


def test_a_quantity_of_two_means_has_an_interval_from_its_resamples():
    """As for one mean, where the other set is all 0."""
    mine = np.array([[0.0], [1.0], [0.0], [0.0]])
    estimate = interval_of_means(lambda a, b: (a - b)[..., 0], [mine, np.zeros((3, 1))])
    assert (estimate.value, estimate.low, estimate.high) == (0.25, 0.0, 0.75)
    both = interval_of_means(lambda a, b: (a - b)[..., 0], [mine, mine])
    assert both.value == 0
    assert both.low < -0.4  # of the same numbers, and yet not drawn together
    assert both.high > 0.4


def test_equal_seeds_give_equal_intervals_and_others_do_not():
    values = np.linspace(0, 1, 30) ** 3
    assert interval(values) == interval(values)
    assert interval(values) != interval(values, seed=1)


def test_values_that_agree_have_no_width():
    estimate = interval([0.3] * 7)
    assert (estimate.low, estimate.high) == pytest.approx((0.3, 0.3))


def test_arrays_are_paired():
    """A recipe that restores half the gain on every prompt restores half of it in every resample."""
    rng = np.random.default_rng(3)
    reuse, full = rng.random(50) * 0.5, 0.5 + rng.random(50) * 0.5
    estimate = ratio_interval((reuse + full) / 2, full, reuse)
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_ratio_may_leave_zero_to_one_and_its_interval_holds_it():
    estimate = ratio_interval([1, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0])
    assert estimate is not None
    assert estimate.value == pytest.approx(4 / 3)  # (5/6 - 1/6) / (4/6 - 1/6)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize(("reuse", "known"), [(0.4, True), (0.41, False), (0.9, False)])
def test_a_ratio_needs_a_gain_of_a_tenth(reuse, known):
    estimate = ratio_interval([0.45] * 5, [0.5] * 5, [reuse] * 5)
    assert (estimate is not None) == known


def test_every_task_counts_alike_and_is_resampled_apart():
    """Of two tasks without spread the mean has none, however unlike they are and however many prompts they have."""
    estimate = interval_over_tasks([[0.0] * 3, [1.0] * 30])
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5, 0.5))


def test_tasks_do_not_share_their_draws():
    """Two equal tasks: the mean's interval is narrower than one task's by the square root of two."""
    values = [0.0, 1.0] * 50
    one, two = interval(values), interval_over_tasks([values, values])
    assert (two.high - two.low) / (one.high - one.low) == pytest.approx(2**-0.5, abs=0.05)


def test_the_overall_ratio_is_that_of_means_over_tasks_with_a_gain():
    tasks = [
        Scores([0.6] * 4, [0.8] * 4, [0.4] * 4),  # gains 0.4, restores 0.2
        Scores([1.0] * 9, [1.0] * 9, [0.8] * 9),  # gains 0.2, restores 0.2
        Scores([0.0] * 5, [0.9] * 5, [0.85] * 5),  # gains too little to count
    ]
    estimate = ratio_over_tasks(tasks)
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert ratio_over_tasks(tasks[2:]) is None


def test_resamples_without_a_gain_are_left_out():
    estimate = ratio_interval([1, 0], [1, 0], [0, 0])  # a quarter of the resamples gains nothing
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


class TestUnpaired:
    def test_the_interval_is_as_wide_as_that_of_independent_runs(self):
        """Of equal values a paired difference would have no width; the variances of independent ones add up."""
        values = [0.0, 1.0] * 200
        found = unpaired_over_tasks([values], [values], resamples=5000)
        assert found.value == 0
        assert found.high == pytest.approx(1.96 * 0.5 / 20 * 2**0.5, abs=0.008)
        assert found.low == pytest.approx(-1.96 * 0.5 / 20 * 2**0.5, abs=0.008)

    def test_runs_may_have_different_numbers_of_prompts(self):
        found = unpaired_over_tasks([[1.0] * 3, [0.5]], [[0.25] * 7, [0.25] * 2])
        assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_divergence_is_zero_for_equal_distributions_at_any_offset():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert kl_divergence(logits, logits + 3) == pytest.approx(0, abs=1e-12)


def test_divergence_is_in_nats_from_the_first_to_the_second():
    half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert kl_divergence(half, quarter) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(quarter, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
