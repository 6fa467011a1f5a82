"""What runs in the next pass of the model: the order among requests that wait for one. Knows no threads and no clock.

Passes alone, which cannot be packed, and packed passes take turns while both wait. A packed pass has the rows of all replies, then
pieces of prompts. So:

- A reply waits for at most one pass alone.
- The prompt that came first gets rows in every packed pass: half of the pass' room, and at least LEAST_PIECE. It needs at most
  ⌈rows / LEAST_PIECE⌉ packed passes, whatever comes after it, and then the next one is the first. With all that came before a
  prompt, its own rows included, R rows in P prompts, it is done after at most R / LEAST_PIECE + P packed passes.
- The rest of the room is for the shortest of the others, which are soonest done.
- Passes alone run in their order: one of them waits for twice as many passes as came before it, and one more.

Piecewise prefill as in Sarathi-Serve, arXiv 2403.02310.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from kvweave.models.attention import RowPlan
from kvweave.models.fused_cache import FusedCache

PASS_S: Final = 0.5
"""Seconds that a pass with pieces of prompts should take: so long they delay a token. Where the weights alone take longer to
read, it takes twice that time."""
WITHOUT_REPLIES: Final = 2.0
"""A pass that delays no token, because no request is decoding, may take so many times as long."""
LEAST_PIECE, MOST_ROWS, FIRST_ROWS = 32, 4096, 256
"""Rows: the smallest piece of a prompt, the most of a pass, and those of a pass before any has been timed."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """One request's rows in a pass: their token ids and rotary positions (T,), and the `plan` by which they attend.

    The last `keep` rows' logits are made. Rows that `appends` follow what the cache holds; others are prompt rows.
    """

    kv_cache: FusedCache
    ids: Tensor
    positions: Tensor
    plan: RowPlan
    keep: int = 1
    appends: bool = False

    def some(self, plan: RowPlan, keep: int = 1) -> "PassRows":
        """Return the rows of `plan` alone, a subset."""
        places = torch.searchsorted(self.plan.rows, plan.rows)
        ids, positions = self.ids[places], self.positions[places]
        return replace(self, ids=ids, positions=positions, plan=plan, keep=keep)


@dataclass(slots=True, eq=False)
class WaitingPass:
    """A pass that waits: rows to run in any number of pieces, or a call that needs the model for itself."""

    rows: PassRows | None
    alone: Callable[[], Any] | None = None
    in_pieces: bool = False
    cancelled: Callable[[], bool] | None = None
    result: "Future[Any]" = field(default_factory=Future)
    done: int = 0

    @property
    def given_up(self) -> bool:
        """Whether its caller no longer wants it."""
        return self.cancelled is not None and self.cancelled()

    @property
    def appends(self) -> bool:
        """Whether it continues a reply."""
        return self.rows is not None and self.rows.appends

    @property
    def left(self) -> int:
        """Rows that have not run yet."""
        return 0 if self.rows is None else self.rows.ids.numel() - self.done

    def piece(self, most: int) -> PassRows:
        """Return the next rows, at most so many; logits only for the last ones."""
        assert self.rows is not None
        if not self.in_pieces or (self.done == 0 and most >= self.left):
            return self.rows
        end = min(self.done + most, self.rows.ids.numel())
        keep = self.rows.keep if end == self.rows.ids.numel() else 0
        return self.rows.some(self.rows.plan.subset(self.rows.plan.rows[self.done : end]), keep)


Batch = list[tuple[WaitingPass, PassRows | None]]
"""What runs next: rows of several requests; or, with None, passes alone and those that were given up."""


class PassSchedule:
    """Chooses what runs next, by how long the latest passes took; `pass_s` is as long as one with prompts should take."""

    def __init__(self, pass_s: float = PASS_S) -> None:
        self.pass_time = PassTime()
        self._pass_s, self._was_alone = pass_s, False

    def choose(self, waiting: Sequence[WaitingPass]) -> Batch:
        """Return what runs next of what waits, at least one, in the order it came."""
        gone = [each for each in waiting if each.given_up]
        if gone:
            return [(each, None) for each in gone]
        alone = [each for each in waiting if each.alone is not None]
        packable = [each for each in waiting if each.rows is not None]
        if alone and not (packable and self._was_alone):
            self._was_alone = True
            return [(alone[0], None)]
        self._was_alone = False
        replies: Batch = [(each, each.piece(each.left)) for each in packable if each.appends]
        room = self._room(bool(replies)) - sum(each.left for each, _ in replies)
        return replies + self._pieces([each for each in packable if not each.appends], room)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a packed pass."""
        if rows >= 2 * LEAST_PIECE:  # passes over fewer rows are for replies
            self.pass_time.record(rows, seconds)

    def _pieces(self, prompts: Sequence[WaitingPass], room: int) -> Batch:
        """Return pieces of the first prompt and of the shortest others; only the first may exceed the room."""
        if not prompts:
            return []
        first, others = prompts[0], sorted(prompts[1:], key=lambda each: each.left)
        rows = first.piece(max(LEAST_PIECE, room // 2, room - sum(each.left for each in others)))
        chosen: Batch = [(first, rows)]
        room -= rows.ids.numel()
        for each in others:
            if each.left > room and (room < LEAST_PIECE or not each.in_pieces):
                break
            rows = each.piece(room)
            chosen.append((each, rows))
            room -= rows.ids.numel()
        return chosen

    def _room(self, replies: bool) -> int:
        """Return the rows of the next pass; `replies` says whether some continue replies."""
        rows = self.pass_time.rows_in(self._pass_s if replies else WITHOUT_REPLIES * self._pass_s)
        return min(MOST_ROWS, max(2 * LEAST_PIECE, FIRST_ROWS if rows is None else rows))


_EARLIER_WEIGHT: Final = 0.9
"""Weight of the earlier passes when another one is recorded."""
MOST_EFFICIENT_ROWS: Final = 256
"""More rows are never taken only for the fixed time to be small beside theirs."""


class PassTime:
    """How long a pass takes by its rows: a straight line through the latest passes (rows, seconds), by least squares.

    Its fixed part is the reading of the weights. Where that is much of the wished time, pieces of prompts become so small
    that most of their time is fixed.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0

    def record(self, rows: int, seconds: float) -> None:
        """Add a pass."""
        self._weight = _EARLIER_WEIGHT * self._weight + 1
        self._rows = _EARLIER_WEIGHT * self._rows + rows
        self._seconds = _EARLIER_WEIGHT * self._seconds + seconds
        self._rows_squared = _EARLIER_WEIGHT * self._rows_squared + rows * rows
        self._product = _EARLIER_WEIGHT * self._product + rows * seconds

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
