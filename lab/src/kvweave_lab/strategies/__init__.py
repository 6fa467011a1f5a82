"""Decoding strategies that kvweave's own is compared with, registered as entry points in `kvweave.strategies`."""

from typing import Final

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
