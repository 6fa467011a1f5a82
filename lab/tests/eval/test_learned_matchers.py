"""The rules of MeanCache and vCache: the best threshold, what vCache serves once it has seen enough, and that its bound holds."""

import numpy as np
import pytest

from kvweave_lab.eval.learned_matchers import meancache_threshold, vcache_scores


@pytest.fixture(scope="module")
def pairs():
    """Pairs of which one in two asks the same, with a cosine that tells most of them apart."""
    rng = np.random.default_rng(7)
    same = rng.random(1200) < 0.5
    return same, np.clip(np.where(same, 0.88, 0.55) + rng.normal(0, 0.08, len(same)), 0, 1)


@pytest.mark.parametrize("bound", [0.02, 0.1])
def test_no_more_than_the_bound_is_wrong(pairs, bound):
    same, cosines = pairs
    served = vcache_scores(same, cosines) >= 1 - bound
    assert served.sum() > 0.2 * same.sum()
    assert (served & ~same).sum() <= 1.5 * bound * served.sum() + 2
    tighter = vcache_scores(same, cosines) >= 1 - bound / 4
    assert tighter.sum() < served.sum()


def test_a_cosine_that_says_nothing_serves_next_to_nothing():
    rng = np.random.default_rng(3)
    same, cosines = rng.random(600) < 0.5, rng.random(600)
    served = vcache_scores(same, cosines) >= 0.98
    assert served.mean() < 0.08  # drawn with a chance of 2 % over what is wrong


@pytest.mark.parametrize("same", [[True] * 5 + [False], [True] * 40])
def test_nothing_is_known_before_the_sixth_pair_or_from_one_label(same):
    scores = vcache_scores(same, np.full(len(same), 0.99))
    assert (scores < 1).all()
    np.testing.assert_array_equal(scores, vcache_scores(same, np.zeros(len(same))))


def test_the_order_is_drawn_from_the_seed(pairs):
    same, cosines = pairs
    np.testing.assert_array_equal(vcache_scores(same, cosines, 1), vcache_scores(same, cosines, 1))
    assert (vcache_scores(same, cosines, 1) != vcache_scores(same, cosines, 2)).any()


def test_meancache_takes_the_threshold_with_the_greatest_f1():
    same, cosines = [True, True, False, True, False, False], np.array([0.9, 0.8, 0.75, 0.7, 0.5, 0.4])
    assert meancache_threshold(same, cosines, [0.45, 0.6, 0.78, 0.85]) == 0.6  # 6/7; 0.78 has 4/5
