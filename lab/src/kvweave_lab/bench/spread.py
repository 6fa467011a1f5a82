"""Several measurements of one thing, as the three numbers that are reported of them."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


def ratios(parts: Sequence[float], wholes: Sequence[float]) -> Spread:
    """Of measurements that were taken in turn, each part to the whole beside it."""
    return Spread.of(part / whole for part, whole in zip(parts, wholes, strict=True))


def timed(step: Callable[[], object]) -> float:
    """How long a step takes, in seconds."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
