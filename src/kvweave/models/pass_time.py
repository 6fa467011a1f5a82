"""How long a pass over so many rows takes, learned from the latest passes: a fixed time, and a time for each row.

The fixed time is that of reading the weights. Where it is a large part of the wished time, pieces of prompts become so
small that most of their time is fixed.
"""

from typing import Final

MEMORY: Final = 0.9
"""Weight of the earlier passes when another one is recorded."""
MOST_EFFICIENT_ROWS: Final = 256
"""More rows are never taken only for the fixed time to be small beside theirs."""


class PassTime:
    """A straight line through the latest passes (rows, seconds), by least squares."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0

    def record(self, rows: int, seconds: float) -> None:
        """Add a pass."""
        self._weight = MEMORY * self._weight + 1
        self._rows = MEMORY * self._rows + rows
        self._seconds = MEMORY * self._seconds + seconds
        self._rows_squared = MEMORY * self._rows_squared + rows * rows
        self._product = MEMORY * self._product + rows * seconds

    def rows_in(self, seconds: float) -> int | None:
        """Return the rows of a pass that takes `seconds`, or as many as take as long as its fixed time; None before a pass."""
        if not self._weight:
            return None
        fixed_s, row_s = self._line()
        efficient = min(fixed_s / row_s, MOST_EFFICIENT_ROWS)
        return int(max((seconds - fixed_s) / row_s, efficient))

    @property
    def rows_per_s(self) -> float | None:
        """Rows that the latest passes computed per second; None before there was one."""
        return self._rows / max(self._seconds, 1e-9) if self._weight else None

    def _line(self) -> tuple[float, float]:
        """Return the fixed time and that of a row, in seconds."""
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_squared / self._weight - mean_rows**2
        per_row_s = mean_s / mean_rows  # with nothing fixed
        if spread > (0.05 * mean_rows) ** 2:
            slope = (self._product / self._weight - mean_rows * mean_s) / spread
            per_row_s = min(per_row_s, max(slope, 0.1 * per_row_s))
        return mean_s - per_row_s * mean_rows, per_row_s
