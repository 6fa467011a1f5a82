"""Means with 95 % intervals by bootstrap (percentile method), paired and over several tasks.

A resample draws prompts with replacement within each task, the same prompts for every array of that task. So the
differences between recipes on one prompt stay together. Knows arrays only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = NDArray[np.float64]

GAIN = 0.1
"""A task on which full attention gains less than this over reuse cannot show how much a recipe restores."""

_Z: Final = 1.959964  # of a normal distribution's middle 95 %
_ROUNDING = 1e-9  # 0.5 - 0.4 counts as a gain of 0.1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float


def share_of(outcomes: Sequence[float | None]) -> Estimate | None:
    """Return the share of outcomes that are 1, of those that are not None, with Wilson's interval; None without any.

    A bootstrap of few outcomes that are all equal would give an interval of no width.
    """
    known = [each for each in outcomes if each is not None]
    return wilson_interval(round(sum(known)), len(known)) if known else None


def wilson_interval(accepted: int, of: int) -> Estimate:
    """Return a share with Wilson's 95 % interval, which keeps its width at shares of 0 and 1."""
    value = accepted / of
    middle = (value + _Z**2 / (2 * of)) / (1 + _Z**2 / of)
    half = _Z / (1 + _Z**2 / of) * math.sqrt(value * (1 - value) / of + _Z**2 / (4 * of**2))
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))


class Scores(NamedTuple):
    """The scores of one task's prompts: of a recipe, of full attention and of reuse, each of shape (prompts,)."""

    score: ArrayLike
    full: ArrayLike
    reuse: ArrayLike


def interval_over_tasks(tasks: Sequence[ArrayLike], *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Return the mean over tasks of each task's mean; the tasks' arrays (prompts,) may differ in length.

    Equal arguments give equal intervals. Pass the differences of two runs on the same prompts for a paired interval.
    """
    columns = [_array(values) for values in tasks]
    means = _resampled(columns, resamples, seed)
    return _estimate(float(np.mean([column.mean() for column in columns])), means)


def interval_of_means(
    of: Callable[[Array, Array], Array],
    pair: Sequence[ArrayLike],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Return a function of the means of two sets of prompts (prompts, m), with each set resampled separately.

    The function `of` receives means of shape (…, m) and returns (…).
    """
    mine, theirs = (np.asarray(values, dtype=np.float64) for values in pair)
    means = _resampled_means((mine, theirs), resamples, seed)
    return _estimate(float(of(mine.mean(axis=0), theirs.mean(axis=0))), of(*means))


def unpaired_over_tasks(
    mine: Sequence[ArrayLike], theirs: Sequence[ArrayLike], *, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Return the difference of two runs' means over tasks; the runs have different prompts and are resampled separately."""
    ours, others = ([_array(values) for values in tasks] for tasks in (mine, theirs))
    value = np.mean([column.mean() for column in ours]) - np.mean([column.mean() for column in others])
    means = _resampled(ours, resamples, seed) - _resampled(others, resamples, seed + 1)
    return _estimate(float(value), means)


def ratio_over_tasks(tasks: Sequence[Scores], *, resamples: int = 2000, seed: int = 0) -> Estimate | None:
    """Return the share of full attention's gain over reuse that a recipe restores (FusionRAG eq. 11).

    Over tasks it is mean restored gain over mean gain, of the tasks with a gain of at least GAIN; None without such a
    task. The original scores decide which tasks those are, not each resample. A resample in which full attention
    gains nothing has no ratio and is left out.
    """
    restored, gains = [], []
    for task in tasks:
        score, full, reuse = (_array(values) for values in task)
        if full.mean() - reuse.mean() >= GAIN - _ROUNDING:
            restored.append(score - reuse)
            gains.append(full - reuse)
    if not gains:
        return None
    return quotient_over_tasks(restored, gains, resamples=resamples, seed=seed)  # Eq. 11


def quotient_over_tasks(
    above: Sequence[ArrayLike], below: Sequence[ArrayLike], *, resamples: int = 2000, seed: int = 0
) -> Estimate | None:
    """Return one run's mean over tasks divided by another's on the same prompts; None if the second one is 0.

    A resample in which the second one is 0 has no quotient and is left out.
    """
    ours, others = [_array(values) for values in above], [_array(values) for values in below]
    under = np.mean([column.mean() for column in others])
    if under <= 0:
        return None
    value = np.mean([column.mean() for column in ours]) / under
    upper, lower = _resampled(ours, resamples, seed), _resampled(others, resamples, seed)
    usable = lower > 0
    return _estimate(float(value), upper[usable] / lower[usable])


def kl_divergence(truth: Tensor, other: Tensor) -> float:
    """Return KL(truth ‖ other) in nats of two distributions given as logits (…, n); never below 0."""
    p, q = (logits.double().log_softmax(-1) for logits in (truth, other))
    return max(0.0, float((p.exp() * (p - q)).sum()))


def _array(values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    assert array.shape > (0,), f"an estimate needs at least one value, not shape {array.shape}"
    return array


def _resampled(columns: Sequence[Array], resamples: int, seed: int) -> Array:
    """Return the mean over columns of their means, for each resample: (resamples,)."""
    return np.mean(_resampled_means(columns, resamples, seed), axis=0)  # type: ignore[no-any-return]


def _resampled_means(sets: Sequence[Array], resamples: int, seed: int) -> list[Array]:
    """Return the mean of each set of prompts (prompts, …) for each resample, sets drawn separately: (resamples, …)."""
    return [
        _draws(len(values), resamples, (seed, number)) @ values / len(values)
        for number, values in enumerate(sets)
    ]


@lru_cache(maxsize=32)
def _draws(prompts: int, resamples: int, seed: tuple[int, int]) -> Array:
    """Return how often each resample draws each prompt: (resamples, prompts). Equal for equal arguments: paired."""
    counts = np.random.default_rng(seed).multinomial(prompts, [1 / prompts] * prompts, size=resamples)
    drawn: Array = counts.astype(np.float64)
    drawn.setflags(write=False)
    return drawn


def _estimate(value: float, means: Array) -> Estimate:
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(value, float(low), float(high))
