"""Interface of a decoding strategy, and its entry budget.

A layer holds its sinks and its recent window itself. Entries that leave the window go to the layer's retriever, which
adds some of them to the attention of every pass. Knows nothing of models or files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvweave.decode.settings import MIN_ENTRIES, OffloadSettings
from kvweave.ops.partial_attention import PartialAttention


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Entries per layer and KV head that one step may attend to.

    `total` is the limit, `window` the most that the recent window may hold; what it leaves goes to clusters.
    """

    total: int
    window: int

    def remaining(self, attended: int) -> int:
        """Return how many entries may be retrieved if `attended` ones are attended to already."""
        return max(0, self.total - attended)


def token_budget(settings: OffloadSettings, stored: int) -> TokenBudget:
    """Return the budget of a step when `stored` entries exist, the newest row's own included."""
    if settings.kv_budget <= 1:
        share = math.ceil(round(settings.kv_budget * stored, 9))
        total = max(share, settings.sinks + MIN_ENTRIES)
    else:
        total = int(settings.kv_budget)
    free = total - settings.sinks
    window = min(settings.window, max(1, free // 2))
    return TokenBudget(total, window)


@dataclass(frozen=True, slots=True)
class CacheHooks:
    """What a layer and its retriever call in their cache.

    Attributes:
        reserve_memory: makes room for the bytes by which the layer, its retriever or the shared index is about to grow.
        has_room: whether that many bytes more fit.
        on_reads_done: starts the next layer's reads; called in every pass as soon as this layer needs nothing more from disk.
    """

    reserve_memory: Callable[[int], None]
    has_room: Callable[[int], bool]
    on_reads_done: Callable[[], None]


class Retriever:
    """Entries of one layer that have left its window; this one keeps none. Tensor letters: G KV heads, n entries, D head width."""

    @property
    def resident_bytes(self) -> int:
        """KV held in memory, without frames and the shared index."""
        return 0

    @property
    def growth_bytes(self) -> int:
        """Memory that the retriever will take next in addition, when what it has is full."""
        return 0

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Store a prompt's entries (G, n, D); `queries` (H, T, D) are those of its last rows, if known."""

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Store copies of entries (G, n, D) that leave the window, oldest first."""

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Return how many of `count` entries it takes now; the others stay in the window."""
        return count

    def prefetch_index(self) -> None:
        """Start reading what selection needs; called as the layer's attention begins."""

    def prefetch(self) -> None:
        """Start reading what the layer will probably retrieve; called before it attends."""

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Add at most `limit` entries per KV head to the attention; return their number, summed over heads."""
        return 0

    def finish_pass(self, budget: TokenBudget) -> None:
        """Do deferred work and release memory; called when the layer is done with a pass."""


class SinkAttention(Retriever):
    """A retriever that discards all entries: attention to sinks and the recent window alone (StreamingLLM)."""
