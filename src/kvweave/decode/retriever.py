"""What a layer's retrieval is, whatever the strategy: the hook at which generation and storage meet.

A layer keeps its sinks and recent window itself; entries that leave the window go to its retriever, which in every
pass adds to the attention what it holds of them. Knows nothing of models or files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvweave.decode.settings import MIN_ENTRIES, OffloadSettings
from kvweave.ops.partial_attention import PartialAttention


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Entries per layer and KV head for one step; `total` is their bound, the others say how it is spent.

    `window` and `buffer` are what may be held there; what they do not use goes to clusters.
    """

    total: int
    window: int
    buffer: int

    def left(self, always: int) -> int:
        """What remains for retrieval after `always` attended entries."""
        return max(0, self.total - always)


def allowance(settings: OffloadSettings, stored: int) -> TokenBudget:
    """What a step may attend to when `stored` entries exist, the newest row's own included."""
    if settings.kv_budget <= 1:
        share = math.ceil(round(settings.kv_budget * stored, 9))
        total = max(share, settings.sinks + MIN_ENTRIES)
    else:
        total = int(settings.kv_budget)
    free = total - settings.sinks
    window = min(settings.window, max(1, free // 2))
    buffer = min(settings.clusters.buffer_entries, (free - window) // 2)
    return TokenBudget(total, window, buffer)


class Retriever(Protocol):
    """One layer's entries behind its window. Tensor letters: G KV heads, n entries, D head width.

    `when_read` is to be called in every pass as soon as the layer needs nothing more from flash, `before_growth` with the
    bytes that it and its centroids are about to take more.
    """

    when_read: Callable[[], None]
    before_growth: Callable[[int], None]

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Take in a prompt's entries (G, n, D) at once; `queries` (H, T, D) are those of its last rows, if known."""
        ...

    def add(self, keys: Tensor, values: Tensor, allowed: TokenBudget) -> None:
        """Take in entries (G, n, D) that leave the window, oldest first; copies what it keeps."""
        ...

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """How many of `waiting` entries it takes now; the others stay in the window."""
        ...

    def begin(self) -> None:
        """The layer's attention begins: start reading what a choice needs."""
        ...

    def ahead(self) -> None:
        """The layer is the next but one to attend: start reading what it will probably ask for."""
        ...

    def attend(self, attention: PartialAttention, left: int) -> int:
        """Add entries to the attention, at most `left` per KV head; returns how many, summed over heads."""
        ...

    def settle(self, allowed: TokenBudget) -> None:
        """The layer is done with this pass: work that was put off, and memory that can go."""
        ...

    @property
    def resident_bytes(self) -> int:
        """KV it holds in memory by itself, frames and centroids not counted."""
        ...


class SinkAttention:
    """A retriever that keeps nothing: attention to sinks and the recent window alone (StreamingLLM)."""

    resident_bytes = 0

    def __init__(self) -> None:
        self.when_read: Callable[[], None] = lambda: None
        self.before_growth: Callable[[int], None] = lambda more_bytes: None

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Nothing is kept."""

    def add(self, keys: Tensor, values: Tensor, allowed: TokenBudget) -> None:
        """Nothing is kept."""

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """All of them."""
        return waiting

    def begin(self) -> None:
        """Nothing to read."""

    def ahead(self) -> None:
        """Nothing to read."""

    def attend(self, attention: PartialAttention, left: int) -> int:
        """Nothing to attend to."""
        self.when_read()
        return 0

    def settle(self, allowed: TokenBudget) -> None:
        """Nothing was put off."""


class DenseAttention(SinkAttention):
    """A retriever that leaves everything in the window: dense attention, in the same code."""

    def wanted(self, waiting: int, allowed: TokenBudget) -> int:
        """None of them."""
        return 0
