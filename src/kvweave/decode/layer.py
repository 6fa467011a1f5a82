"""One layer of a cache that is decoded by retrieval: what the library updates and what our attention asks.

New rows go to the recent window; what the window no longer holds goes to the layer's retriever. A layer with a sliding
window of its own stays as it is: it keeps that window and retrieves nothing. Tensor letters: G KV heads, T new rows,
D head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvweave.decode.retriever import Retriever, SinkAttention, TokenBudget
from kvweave.errors import InvalidRequest
from kvweave.models.attention import AttentionCall
from kvweave.ops.partial_attention import PartialAttention


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


_ROWS_AT_ONCE = 256  # that are in the window before the oldest leave it


class OffloadedLayer(CacheLayerMixin):
    """`retriever` keeps what leaves the window; `allow` says how many entries a step attends to, given those stored.

    `before_growth` is called with the bytes that the layer is about to take more.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, sinks: int, retriever: Retriever, allow: Callable[[int], TokenBudget]) -> None:
        super().__init__()
        self.recent = RecentWindow(sinks)
        self.retriever = retriever
        self.sliding: int | None = None
        self.before_growth: Callable[[int], None] = lambda more_bytes: None
        self._allow = allow

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Part of the library's interface."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in new rows (1, G, T, D) and return them alone: attention finds the others here."""
        if key_states.shape[0] != 1:
            raise InvalidRequest(
                f"a batch of {key_states.shape[0]} sequences (beams, samples) cannot be decoded by retrieval; decode "
                "one at a time, or leave kv out"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._take_in(key_states[0], value_states[0])
        return key_states, value_states

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None, sliding: int | None) -> None:
        """Take in a prompt's rows (G, N, D); `queries` (H, T, D) of its last ones; `sliding`: the layer's own window."""
        self.lazy_initialization(keys, values)
        self._slides(sliding)
        count = keys.shape[1]
        latest = self._kept(count)
        first = min(self.recent.wanted_sinks, count)
        middle = max(first, count - latest)
        if middle > first:
            between = slice(first, middle)
            if not self.retriever.wanted(middle - first, self._allow(count)):
                middle = first
            else:
                self.retriever.fill(keys[:, between], values[:, between], queries)
        self._take_in(keys[:, :first], values[:, :first])
        self.recent.skip(middle - first)
        self._take_in(keys[:, middle:], values[:, middle:])

    def attend(self, call: AttentionCall, rows: Tensor) -> tuple[Tensor, int]:
        """The attention output (1, H, T, D) of new rows (T,), and how many entries they saw, summed over KV heads."""
        attention = self._attention(call)
        seen = self._attend_held(attention, rows, own=rows.numel() - 1)
        self._let_go(self._allow(self.recent.seen))
        return attention.result(), seen

    def attend_behind(self, call: AttentionCall, rows: Tensor) -> tuple[Tensor, int]:
        """The same of rows (T,) of a prompt behind all that is held, whose keys and values (1, G, N, D) the call has."""
        attention, first = self._attention(call), self.recent.seen
        seen = self._add(attention, call.keys[0], call.values[0], first, first + rows)
        seen += self._attend_held(attention, first + rows, own=0)
        if self.sliding is None:
            self.retriever.settle(self._allow(first))
        return attention.result(), seen

    def extend(self, keys: Tensor, values: Tensor, sliding: int | None) -> None:
        """Take in further rows (G, N, D) of the text that have been attended from."""
        self._slides(sliding)
        for some in zip(keys.split(_ROWS_AT_ONCE, 1), values.split(_ROWS_AT_ONCE, 1), strict=True):
            self._take_in(*some)
            self._let_go(self._allow(self.recent.seen))

    def resume(self, state: dict[str, Tensor], seen: int, sliding: int | None) -> None:
        """Hold the window that `recent.state` gave after `seen` positions."""
        self.recent.restore(state, seen)
        for keys, values, _ in self.recent.parts():
            self.lazy_initialization(keys, values)
        self._slides(sliding)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset for the library's masks, which our attention does not use."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions seen so far."""
        return self.recent.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def _attention(self, call: AttentionCall) -> PartialAttention:
        self._slides(call.window)
        return PartialAttention(call.query, call.keys.shape[1], scaling=call.scaling, softcap=call.softcap)

    def _add(
        self, attention: PartialAttention, keys: Tensor, values: Tensor, start: int, rows: Tensor
    ) -> int:
        """Attend from rows (T,) to keys and values (G, n, D) that stand from `start` on; how many the last row saw."""
        positions = torch.arange(start, start + keys.shape[1], device=rows.device)
        visible = positions <= rows[:, None]  # (T, n)
        if self.sliding is not None:
            visible &= positions > rows[:, None] - self.sliding
        attention.add(keys, values, None if bool(visible.all()) else visible[None])
        return int(visible[-1].sum()) * keys.shape[0]

    def _attend_held(self, attention: PartialAttention, rows: Tensor, own: int) -> int:
        """Attend from rows (T,) to what is held, `own` entries beside the budget; how many the last row saw."""
        seen = sum(self._add(attention, *part, rows) for part in self.recent.parts())
        always = self.recent.sinks + self.recent.held - own
        if self.sliding is None:
            seen += self.retriever.attend(attention, self._allow(self.recent.seen).left(always))
        return seen

    def _slides(self, window: int | None) -> None:
        """Learn that the layer has a window of its own, beyond which nothing is ever seen."""
        if window is not None and self.sliding is None:
            self.sliding = window
            self.retriever = SinkAttention()

    def _kept(self, held: int) -> int:
        """How many latest rows stay when the next row comes."""
        if self.sliding is not None:
            return min(held, self.sliding - 1)
        return min(held, self._allow(self.recent.seen or held).window - 1)

    def _take_in(self, keys: Tensor, values: Tensor) -> None:
        """New rows (G, T, D) join the window."""
        self.before_growth(self.recent.growth_bytes(keys, keys.shape[1]))
        self.recent.append(keys, values)

    def _let_go(self, allowed: TokenBudget) -> None:
        kept = self._kept(self.recent.held)
        leaving = self.retriever.wanted(self.recent.held - kept, allowed) if self.recent.held > kept else 0
        if leaving:
            keys, values = self.recent.leave(leaving)
            self.retriever.add(keys, values, allowed)
            self.recent.trim()
        if self.sliding is None:
            self.retriever.settle(allowed)
