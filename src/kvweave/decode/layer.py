"""One layer of an offloaded cache: its sinks, its recent window, and a retriever for the entries in between.

New rows go to the window; what leaves it goes to the retriever. A layer with a sliding window of its own keeps that
window and retrieves nothing. Tensor letters: G KV heads, T new rows, D head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvweave.decode.strategy import CacheHooks, Retriever, SinkAttention, TokenBudget
from kvweave.errors import InvalidRequest
from kvweave.models.attention import AttentionCall
from kvweave.ops.partial_attention import PartialAttention

_BLOCK_ROWS = 256  # appended to the window before its oldest entries leave
_LEAVE_TOGETHER = 0.25  # of a full window, so that what each departure costs is shared


class OffloadedLayer(CacheLayerMixin):
    """Sinks and window in `recent`, older entries in `retriever`; `budget_for` gives a step's budget for N stored entries."""

    is_sliding = False
    is_croppable = False

    def __init__(
        self, sinks: int, retriever: Retriever, budget_for: Callable[[int], TokenBudget], hooks: CacheHooks
    ) -> None:
        super().__init__()
        self.recent = RecentWindow(sinks)
        self.retriever = retriever
        self.sliding_window: int | None = None
        self.hooks = hooks
        self._budget_for = budget_for

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record dtype and device; part of the transformers interface."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new rows (1, G, T, D) and return them alone; attention finds the older ones here.

        Raises InvalidRequest for a batch.
        """
        if key_states.shape[0] != 1:
            raise InvalidRequest(
                f"a batch of {key_states.shape[0]} sequences (beams, samples) cannot be decoded by retrieval; decode "
                "one at a time, or leave kv out"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states[0], value_states[0])
        return key_states, value_states

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None, sliding_window: int | None) -> None:
        """Store a prompt's rows (G, N, D); `queries` (H, T, D) are those of its last rows, if known."""
        self.lazy_initialization(keys, values)
        self._set_sliding_window(sliding_window)
        count = keys.shape[1]
        first = min(self.recent.max_sinks, count)
        window_start = max(first, count - self._window_size(count))
        if window_start > first:
            if self.retriever.accepts(window_start - first, self._budget_for(count)):
                between = slice(first, window_start)
                self.retriever.fill(keys[:, between], values[:, between], queries)
            else:
                window_start = first
        self._append(keys[:, :first], values[:, :first])
        self.recent.skip(window_start - first)
        self._append(keys[:, window_start:], values[:, window_start:])

    def attend(self, call: AttentionCall, rows: Tensor) -> tuple[Tensor, int]:
        """Return the attention output (1, H, T, D) of new rows (T,) and the attended entries, summed over KV heads.

        The rows have been appended by `update`.
        """
        attention = self._start_attention(call)
        attended = self._attend_stored(attention, rows, own=rows.numel() - 1)
        self._trim_window(self._budget_for(self.recent.seq_length))
        return attention.result(), attended

    def attend_turn(self, call: AttentionCall, rows: Tensor) -> tuple[Tensor, int]:
        """As `attend` for rows (T,) of a prompt that follows the stored text; `call` has its keys and values (1, G, N, D)."""
        attention, first = self._start_attention(call), self.recent.seq_length
        attended = self._attend_segment(attention, call.keys[0], call.values[0], first, first + rows)
        attended += self._attend_stored(attention, first + rows, own=0)
        if self.sliding_window is None:
            self.retriever.finish_pass(self._budget_for(first))
        return attention.result(), attended

    def append(self, keys: Tensor, values: Tensor, sliding_window: int | None) -> None:
        """Append rows (G, N, D) of a turn whose attention is done."""
        self._set_sliding_window(sliding_window)
        for block in zip(keys.split(_BLOCK_ROWS, 1), values.split(_BLOCK_ROWS, 1), strict=True):
            self._append(*block)
            self._trim_window(self._budget_for(self.recent.seq_length))

    def restore(self, window: dict[str, Tensor], seq_length: int, sliding_window: int | None) -> None:
        self.recent.restore(window, seq_length)
        for keys, values, _ in self.recent.segments():
            self.lazy_initialization(keys, values)
        self._set_sliding_window(sliding_window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset of the library's masks, which our attention does not use."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.recent.seq_length

    def get_max_length(self) -> int:
        return -1

    def _start_attention(self, call: AttentionCall) -> PartialAttention:
        self._set_sliding_window(call.settings.window)
        scaling, softcap = call.settings.scaling, call.settings.softcap
        return PartialAttention(call.query, call.keys.shape[1], scaling=scaling, softcap=softcap)

    def _attend_stored(self, attention: PartialAttention, rows: Tensor, own: int) -> int:
        """Attend from rows (T,) to all that is stored; return the entries that the last row attends to.

        `own` entries in the window are the pass's own and do not count against the budget.
        """
        attended = sum(self._attend_segment(attention, *segment, rows) for segment in self.recent.segments())
        always = self.recent.sinks + self.recent.entries - own
        if self.sliding_window is None:
            limit = self._budget_for(self.recent.seq_length).remaining(always)
            attended += self.retriever.attend(attention, limit)
        return attended

    def _attend_segment(
        self, attention: PartialAttention, keys: Tensor, values: Tensor, start: int, rows: Tensor
    ) -> int:
        """Attend from rows (T,) to keys and values (G, n, D) at positions from `start`; return as `_attend_stored`."""
        positions = torch.arange(start, start + keys.shape[1], device=rows.device)
        visible = positions <= rows[:, None]  # (T, n)
        if self.sliding_window is not None:
            visible &= positions > rows[:, None] - self.sliding_window
        attention.add(keys, values, None if bool(visible.all()) else visible[None])
        return int(visible[-1].sum()) * keys.shape[0]

    def _set_sliding_window(self, window: int | None) -> None:
        """Record the layer's own window: entries beyond it are never attended again, so nothing is retrieved."""
        if window is not None and self.sliding_window is None:
            self.sliding_window = window
            self.retriever = SinkAttention()

    def _window_size(self, entries: int) -> int:
        """Return how many of the latest `entries` stay when the next row comes."""
        if self.sliding_window is not None:
            return min(entries, self.sliding_window - 1)
        return min(entries, self._budget_for(self.recent.seq_length or entries).window - 1)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        self.hooks.reserve_memory(self.recent.growth_bytes(keys, keys.shape[1]))
        self.recent.append(keys, values)

    def _trim_window(self, budget: TokenBudget) -> None:
        """Move entries beyond the window to the retriever, and finish the pass."""
        size = self._window_size(self.recent.entries)
        surplus = self.recent.entries - size
        if surplus > 0 and self.sliding_window is None:
            surplus += int(_LEAVE_TOGETHER * size)
        accepted = self.retriever.accepts(surplus, budget) if surplus > 0 else 0
        if accepted:
            keys, values = self.recent.pop_oldest(accepted)
            self.retriever.add(keys, values, budget)
            del keys, values  # views, which would keep the old buffer
        self._trim_buffer()
        if self.sliding_window is None:
            self.retriever.finish_pass(budget)

    def _trim_buffer(self) -> None:
        """Shrink the window's buffer, unless the copy does not fit now: a later pass tries again."""
        more_bytes = self.recent.trim_bytes
        if more_bytes and self.hooks.has_room(more_bytes):
            self.hooks.reserve_memory(more_bytes)
            self.recent.trim()


class RecentWindow:
    """Keys and values (G, n, D) of the first `max_sinks` positions and of the latest ones.

    `seq_length` counts all positions so far, those stored elsewhere included.
    """

    def __init__(self, max_sinks: int) -> None:
        self.max_sinks = max_sinks
        self.seq_length = 0
        self._sinks: Tensor | None = None  # (2, G, sinks, D)
        self._rows: Tensor | None = None  # (2, G, capacity, D)
        self._start = self._end = 0  # the valid part of `_rows`

    @property
    def entries(self) -> int:
        """Entries in the window, without sinks."""
        return self._end - self._start

    @property
    def sinks(self) -> int:
        return 0 if self._sinks is None else self._sinks.shape[2]

    @property
    def resident_bytes(self) -> int:
        return sum(part.nbytes for part in (self._sinks, self._rows) if part is not None)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append copies of new rows (G, T, D); the first ones become sinks."""
        if not keys.shape[1]:
            return
        rows = torch.stack([keys, values])  # (2, G, T, D)
        missing = min(self.max_sinks - self.sinks, rows.shape[2])
        if missing > 0:
            first = rows[:, :, :missing]
            self._sinks = first.clone() if self._sinks is None else torch.cat([self._sinks, first], dim=2)
            rows = rows[:, :, missing:]
        self.seq_length += keys.shape[1]
        count = rows.shape[2]
        if not count:
            return
        if self._rows is None or not self._fits(count):
            self._reallocate(rows, _capacity(self.entries + count))
        assert self._rows is not None
        self._rows[:, :, self._end : self._end + count] = rows
        self._end += count

    def growth_bytes(self, like: Tensor, count: int) -> int:
        """Return the extra memory needed while `count` rows of the width of `like` (G, T, D) are appended.

        The old buffer is released only after the copy.
        """
        if self._fits(count):
            return 0
        sinks = min(self.sinks + count, self.max_sinks)
        # Sinks are copied first; their old memory is released before the window is copied.
        rows = max(_capacity(self.entries + count), sinks)
        return 2 * like.shape[0] * rows * like.shape[2] * like.itemsize

    @property
    def trim_bytes(self) -> int:
        """Extra memory needed by `trim`, which releases the old buffer only after the copy."""
        if self._rows is None or self._rows.shape[2] <= 2 * _capacity(self.entries):
            return 0
        return self._rows.nbytes // self._rows.shape[2] * _capacity(self.entries)

    def trim(self) -> None:
        """Shrink the buffer if the window has become much smaller."""
        if self._rows is not None and self.trim_bytes:
            self._reallocate(self._rows, _capacity(self.entries))

    def skip(self, count: int) -> None:
        """Count positions that are stored elsewhere from the start."""
        self.seq_length += count

    def pop_oldest(self, count: int) -> tuple[Tensor, Tensor]:
        """Remove the oldest `count` entries; return views of keys and values (G, count, D), valid until `append`."""
        assert self._rows is not None
        rows = self._rows[:, :, self._start : self._start + count]
        self._start += count
        return rows[0], rows[1]

    def segments(self) -> list[tuple[Tensor, Tensor, int]]:
        """Return runs of entries: keys and values (G, n, D), read-only, and the position of the first one."""
        found = []
        if self._sinks is not None:
            found.append((self._sinks[0], self._sinks[1], 0))
        if self._rows is not None and self.entries:
            rows = self._rows[:, :, self._start : self._end]
            found.append((rows[0], rows[1], self.seq_length - self.entries))
        return found

    def state(self) -> dict[str, Tensor]:
        found = {} if self._sinks is None else {"sinks": self._sinks.clone()}
        if self._rows is not None:
            found["window"] = self._rows[:, :, self._start : self._end].contiguous()
            found["room"] = torch.tensor([self._start, self._rows.shape[2]])
        return found

    def restore(self, state: dict[str, Tensor], seq_length: int) -> None:
        self._sinks = state.get("sinks")
        self.seq_length = seq_length
        if "window" in state:
            window, (start, capacity) = state["window"], state["room"].tolist()
            self._rows = window.new_empty(*window.shape[:2], capacity, window.shape[3])
            self._start, self._end = start, start + window.shape[2]
            self._rows[:, :, self._start : self._end] = window

    def _fits(self, count: int) -> bool:
        return self._rows is not None and self._end + count <= self._rows.shape[2]

    def _reallocate(self, like: Tensor, capacity: int) -> None:
        """Move the window to a new buffer of the shape of `like` (2, G, …, D)."""
        count = self.entries
        moved = like.new_empty(2, like.shape[1], capacity, like.shape[3])
        if self._rows is not None:
            moved[:, :, :count] = self._rows[:, :, self._start : self._end]
        self._rows, self._start, self._end = moved, 0, count


def _capacity(entries: int) -> int:
    """Leave room for half as many again, so that entries are rarely moved."""
    return entries + max(16, entries // 2)
