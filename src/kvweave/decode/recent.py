"""The part of a layer's KV that every step attends to: sinks at the front, the recent window at the end.

One layer's, in sequence order. Entries leave the window from its old end, for whatever keeps them then. Tensor
letters: G KV heads, T new rows, D head width.
"""

import torch
from torch import Tensor


class RecentWindow:
    """Keys and values (G, n, D) of the first `sinks` positions and of the latest ones."""

    def __init__(self, sinks: int) -> None:
        self.wanted_sinks = sinks
        self._first: Tensor | None = None  # (2, G, sinks, D)
        self._rows: Tensor | None = None  # (2, G, capacity, D)
        self._start = self._end = 0  # the valid part of `_rows`
        self.seen = 0  # positions appended so far

    @property
    def held(self) -> int:
        """Entries in the window, sinks not counted."""
        return self._end - self._start

    @property
    def sinks(self) -> int:
        """Sinks held."""
        return 0 if self._first is None else self._first.shape[2]

    @property
    def resident_bytes(self) -> int:
        """What the buffers take."""
        return sum(part.nbytes for part in (self._first, self._rows) if part is not None)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in new rows (G, T, D), copied; the first of all become sinks."""
        if not keys.shape[1]:
            return
        rows = torch.stack([keys, values])  # (2, G, T, D)
        free = min(self.wanted_sinks - self.sinks, rows.shape[2])
        if free > 0:
            first = rows[:, :, :free]
            self._first = first.clone() if self._first is None else torch.cat([self._first, first], dim=2)
            rows = rows[:, :, free:]
        self.seen += keys.shape[1]
        count = rows.shape[2]
        if not count:
            return
        self._make_room(rows, count)
        assert self._rows is not None
        self._rows[:, :, self._end : self._end + count] = rows
        self._end += count

    def growth_bytes(self, like: Tensor, count: int) -> int:
        """What buffers take more while `count` rows are taken in, each as wide as `like` (G, T, D): old ones go afterwards."""
        if self._rows is not None and self._end + count <= self._rows.shape[2]:
            return 0
        return 2 * like.shape[0] * _capacity(self.held + count) * like.shape[2] * like.itemsize

    def trim(self) -> None:
        """Give back what a window that has shrunk does not need any more."""
        if self._rows is not None and self._rows.shape[2] > 2 * _capacity(self.held):
            self._move(self._rows, _capacity(self.held))

    def skip(self, count: int) -> None:
        """Count positions that are kept elsewhere from the start."""
        self.seen += count

    def leave(self, count: int) -> tuple[Tensor, Tensor]:
        """The oldest `count` entries, keys and values (G, count, D); views, valid until the next `append`."""
        assert self._rows is not None
        gone = self._rows[:, :, self._start : self._start + count]
        self._start += count
        return gone[0], gone[1]

    def parts(self) -> list[tuple[Tensor, Tensor, int]]:
        """What is held: keys and values (G, n, D) to be read only, and the position of the first of them."""
        found = []
        if self._first is not None:
            found.append((self._first[0], self._first[1], 0))
        if self._rows is not None and self.held:
            rows = self._rows[:, :, self._start : self._end]
            found.append((rows[0], rows[1], self.seen - self.held))
        return found

    def state(self) -> dict[str, Tensor]:
        """Copies of what is held, for `restore`."""
        found = {} if self._first is None else {"sinks": self._first.clone()}
        if self._rows is not None:
            found["window"] = self._rows[:, :, self._start : self._end].contiguous()
            found["room"] = torch.tensor([self._start, self._rows.shape[2]])
        return found

    def restore(self, state: dict[str, Tensor], seen: int) -> None:
        """Hold what `state` gave, `seen` positions in all."""
        self._first = state.get("sinks")
        self.seen = seen
        if "window" in state:
            window, (start, room) = state["window"], state["room"].tolist()
            self._rows = window.new_empty(*window.shape[:2], room, window.shape[3])
            self._start, self._end = start, start + window.shape[2]
            self._rows[:, :, self._start : self._end] = window

    def _make_room(self, like: Tensor, count: int) -> None:
        if self._rows is not None and self._end + count <= self._rows.shape[2]:
            return
        self._move(like, _capacity(self.held + count))

    def _move(self, like: Tensor, capacity: int) -> None:
        held = self.held
        moved = like.new_empty(2, like.shape[1], capacity, like.shape[3])
        if self._rows is not None:
            moved[:, :, :held] = self._rows[:, :, self._start : self._end]
        self._rows, self._start, self._end = moved, 0, held


def _capacity(entries: int) -> int:
    """Room for half as many again, so that entries are moved seldom."""
    return entries + max(16, entries // 2)
