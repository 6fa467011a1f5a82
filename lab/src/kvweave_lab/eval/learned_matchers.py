"""The rules of MeanCache and vCache, which learn from pairs of questions with known labels; both see the cosines that all matchers get."""

import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

VCACHE_BOUND: Final = 0.02
"""vCache's bound on the share of wrong answers, δ; it is the default of its code."""

_FEWEST: Final = 6  # observations before vCache serves anything
_ROUNDS: Final = 12  # of Newton's method, from 0: it may not converge from far away
_FLATTEST: Final = 1e-6
_LEVELS: Final = np.linspace(1e-6, 1 - 1e-6, 50)
_QUANTILES: Final = np.array([NormalDist().inv_cdf(1 - level) for level in _LEVELS])

Scores = NDArray[np.float64]


def meancache_threshold(same: Sequence[bool], cosines: Scores, thresholds: Sequence[float]) -> float:
    """Return the threshold at which serving by the cosine has the greatest F1 on these pairs, the lowest such.

    MeanCache's clients set theirs so on pairs of their own, after training the embedding model together. Here it is set on the pairs that
    it is measured on, which favours it, and the model is as it comes.
    """
    asked = np.asarray(same, dtype=bool)

    def f1(threshold: float) -> float:
        served = cosines >= threshold
        return 2 * float((served & asked).sum()) / float(served.sum() + asked.sum())

    return max(thresholds, key=f1)


def vcache_scores(same: Sequence[bool], cosines: Scores, seed: int = 0) -> Scores:
    """Return (pairs,) a score by which vCache serves a pair where it is at least 1 − δ: Algorithm 1 of the paper.

    A logistic curve over the cosine is fitted to the pairs before this one, which come in a drawn order. Its midpoint's confidence
    interval gives a lower bound α on the chance that the answer is right. vCache serves with a chance of δ/(1 − α).

    What differs from vCache: all stored questions share one curve, because each of these is asked once and vCache serves none before the
    sixth question to it; and it learns from every pair before, where vCache learns nothing from those that it serves.
    """
    drawn = random.Random(seed)
    order = drawn.sample(range(len(cosines)), len(cosines))
    scores = np.zeros(len(cosines))
    labels = np.asarray(same, dtype=np.float64)[order]
    seen = np.stack([np.ones(len(order)), cosines[order]], axis=1)  # (pairs, intercept and cosine)
    for number, pair in enumerate(order):
        chance = 0.0
        if number >= _FEWEST and 0 < labels[:number].sum() < number:
            weights, covariance = _fitted(seen[:number], labels[:number])
            chance = _surely_right(float(cosines[pair]), weights, covariance)
        scores[pair] = 1 - (1 - drawn.random()) * (1 - chance)
    return scores


def _fitted(rows: Scores, labels: Scores) -> tuple[Scores, Scores]:
    """Return the weights (intercept, slope) of a logistic regression and their covariance (2, 2)."""
    weights: Scores = np.zeros(2)
    for _ in range(_ROUNDS):
        chances = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        spread = chances * (1 - chances)
        # A little of the identity: labels that a cosine separates have no finite fit.
        information = rows.T @ (spread[:, None] * rows) + 1e-3 * np.eye(2)
        weights = weights + np.linalg.solve(information, rows.T @ (labels - chances) - 1e-3 * weights)
    covariance: Scores = np.linalg.inv(information).astype(np.float64)
    return weights, covariance


def _surely_right(cosine: float, weights: Scores, covariance: Scores) -> float:
    """Return the greatest lower bound on the chance that a pair of this cosine asks the same, 0..1, over all levels of confidence."""
    intercept, slope = float(weights[0]), max(float(weights[1]), _FLATTEST)
    gradient = np.array([-1 / slope, intercept / slope**2])  # of the midpoint (delta method)
    deviation = float(np.sqrt(max(0.0, gradient @ covariance @ gradient)))
    midpoints = np.clip(-intercept / slope + _QUANTILES * deviation, 0.0, 1.0)
    chances = 1 / (1 + np.exp(-np.clip(slope * (cosine - midpoints), -30, 30)))
    return float(((1 - _LEVELS) * chances).max())
