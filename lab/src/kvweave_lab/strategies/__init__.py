"""Decoding strategies that kvweave's own is compared with, registered as entry points in `kvweave.strategies`."""

from dataclasses import fields, replace
from typing import Final

from kvweave.decode.counters import DecodeCounts

DENSE: Final = "dense"
OUTLINE: Final = "outline"
"""kvweave's own."""
OUTLINE_ENTRIES: Final = "outline-entries"
"""The same with single entries in place of clusters, which a disk does not give at that price."""
CLUSTERED: Final = ("dynakv", "static", "local")
"""DynaKV and its baselines: clusters that are known by their centroids."""

STRATEGIES: Final = (OUTLINE, *CLUSTERED, "entries", "window", DENSE)
"""What evaluations and benchmarks compare, kvweave's first; ablations of that one are in `ablations.py`."""

INDEXED: Final = (OUTLINE_ENTRIES, "retroinfer", "pqcache", "pqcache-fine", "quest", "clusterkv", "oracle")
"""What is compared at equal bytes read in addition, ours first: these keep all entries in memory, so that they have no cost."""

MEMORY_SHARE: Final = 0.3
"""Default memory limit of measurements, as a share of the size of all KV."""

_LEVELS: Final = ("resident_bytes", "peak_resident_bytes")  # current values, not sums


def counts_since(earlier: DecodeCounts, counts: DecodeCounts) -> DecodeCounts:
    """Return what was added since `earlier`, a copy; the resident bytes and their peak stay as they are."""
    sums = [field.name for field in fields(counts) if field.name not in _LEVELS]
    return replace(counts, **{name: getattr(counts, name) - getattr(earlier, name) for name in sums})
