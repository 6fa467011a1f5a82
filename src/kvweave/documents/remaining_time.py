"""Estimates how long a run of preparation still takes, from what this run itself has measured."""

from collections import deque
from collections.abc import Mapping
from statistics import quantiles
from typing import Final

_RECENT: Final = 12
"""Measurements of a kind that count. Older ones do not: other programs may have begun or ended since."""
_FEWEST: Final = 3


class RemainingTime:
    """The recent speed of each kind of entry.

    Earlier runs do not count: the machine may have been idle then, and be busy now. Nor does the first measurement of a run, in
    which libraries and weights are read for the first time.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._seconds_per_token: dict[str, deque[float]] = {}

    def add(self, kind: str, tokens: int, seconds: float) -> None:
        """Count how long so many tokens of a kind took."""
        if not self._is_first and tokens:
            self._seconds_per_token.setdefault(kind, deque(maxlen=_RECENT)).append(seconds / tokens)
        self._is_first = False

    def estimate(self, left: Mapping[str, int]) -> tuple[float, float] | None:
        """Return about the least and the most seconds for the tokens of each kind that are left.

        They are the quartiles of the recent speed, so one slow chunk changes neither much. None before each kind has
        `_FEWEST` measurements.
        """
        least = most = 0.0
        for kind, tokens in left.items():
            measured = self._seconds_per_token.get(kind, ())
            if len(measured) < _FEWEST:
                return None
            fast, _, slow = quantiles(measured, n=4, method="inclusive")
            least, most = least + tokens * fast, most + tokens * slow
        return least, most
