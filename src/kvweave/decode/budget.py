"""Who gets how many of the entries that a step may attend to: sinks, the recent window, buffers, clusters.

What is always attended comes first and takes at most half of what is left to share, so that a small budget still
retrieves. Knows nothing of clusters or files.
"""

import math
from dataclasses import dataclass

from kvweave.decode.settings import MIN_ENTRIES, ClusteredKV


@dataclass(frozen=True, slots=True)
class Allowance:
    """Entries per layer and KV head for one step; `total` is their bound, the others say how it is spent.

    `window` and `buffer` are what may be held there; what they do not use goes to clusters.
    """

    total: int
    window: int
    buffer: int

    def left(self, always: int) -> int:
        """What remains for retrieval after `always` attended entries."""
        return max(0, self.total - always)


def allowance(settings: ClusteredKV, stored: int) -> Allowance:
    """What a step may attend to when `stored` entries exist, the newest row's own included."""
    if settings.kv_budget <= 1:
        share = math.ceil(round(settings.kv_budget * stored, 9))
        total = max(share, settings.sinks + MIN_ENTRIES)
    else:
        total = int(settings.kv_budget)
    free = total - settings.sinks
    window = min(settings.window, max(1, free // 2))
    buffer = min(settings.clusters.buffer_entries, (free - window) // 2)
    return Allowance(total, window, buffer)
