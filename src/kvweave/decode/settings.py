"""Settings of offloaded decoding: `OffloadSettings`, with those of the clusters and of their files.

The layout on disk is DynaKV's (arXiv 2511.07427).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from kvweave.errors import InvalidRequest
from kvweave.types import Storage

PAGE_BYTES = 4096
"""Unit of writes to the disk, and alignment of direct reads."""
MIN_ENTRIES = 8
"""Fewest entries, without sinks, that a step attends to, however small the budget."""

Check = tuple[bool, str]
"""Whether a setting is valid, and the error message if not."""


def raise_if_invalid(*checks: Check) -> None:
    """Raise InvalidRequest with the message of the first check that fails."""
    for valid, message in checks:
        if not valid:
            raise InvalidRequest(message)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How entries are clustered.

    Args:
        mean_entries: target size when many clusters are created at once.
        max_entries: the largest size. A new entry of a full cluster begins another one.

    Raises InvalidRequest for invalid values.
    """

    mean_entries: int = 16
    max_entries: int = 64

    def __post_init__(self) -> None:
        raise_if_invalid(
            (
                1 <= self.mean_entries <= self.max_entries,
                f"clusters of {self.mean_entries} entries on average and {self.max_entries} at most; the first must be at "
                "least 1 and not above the second",
            ),
            (self.max_entries >= 2, f"max_entries is {self.max_entries}; a cluster holds at least 2"),
        )


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How clusters are laid out on disk and read (DynaKV §5).

    Args:
        tail_pages: half-filled last pages that a head keeps in memory for clusters that were evicted.
        gap_pages: read through gaps of up to this many pages instead of starting another read.
        direct: bypass the system's page cache, where the file system allows it.
        readers: concurrent reads.
        page_bytes: page size.
    """

    tail_pages: int = 4
    gap_pages: int = 2
    direct: bool = True
    readers: int = 4
    page_bytes: int = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """How `generate` decodes with the KV cache on disk.

    Args:
        kv_budget: entries that a step attends to, per layer and KV head: up to 1 a share of the stored entries, above 1
            a number. It includes sinks and the recent window. A pass over several rows attends to its own rows in addition.
        resident_bytes: hard limit of the KV in memory, over all layers: windows, buffers, pages, what is known of clusters, and
            the entries being attended to. None holds all that fits the model's context.
        strategy: `outline`, or the name of one that a package adds through `kvweave.strategies`.
        folder: folder of the files while decoding. None is the system's temporary folder, which should not be in memory.
        sinks: first positions of the text, always attended.
        window: latest positions, always attended; when it is full, its oldest quarter leaves. Fewer where the budget is small.
        storage: how keys and values are stored; "exact" keeps the model's dtype.
        clusters: how entries are clustered; None takes the strategy's own sizes.
        disk: how clusters are stored.

    Raises InvalidRequest for invalid values.
    """

    kv_budget: float = 0.15
    resident_bytes: int | None = None
    strategy: str = "outline"
    folder: Path | None = None
    sinks: int = 4
    window: int = 64
    storage: Storage = "exact"
    clusters: ClusterSettings | None = None
    disk: DiskSettings = field(default_factory=DiskSettings)

    def __post_init__(self) -> None:
        raise_if_invalid(
            *_budget_checks(self),
            *_disk_checks(self.disk),
            (
                self.storage in get_args(Storage),
                f"storage is {self.storage!r}; it is one of {', '.join(map(repr, get_args(Storage)))}",
            ),
        )


def _budget_checks(settings: OffloadSettings) -> Iterator[Check]:
    budget, least = settings.kv_budget, settings.sinks + MIN_ENTRIES
    yield 0 < budget < math.inf, f"kv_budget is {budget}; it is a share in (0, 1] or a number of entries"
    yield (
        budget <= 1 or budget % 1 == 0,
        f"kv_budget is {budget}; above 1 it is a number of entries, which must be whole",
    )
    yield (
        budget <= 1 or budget >= least,
        f"kv_budget is {budget:g} entries; with {settings.sinks} sinks at least {least} are needed",
    )
    yield settings.sinks >= 0, f"sinks is {settings.sinks}; it cannot be negative"
    yield settings.window >= 1, f"window is {settings.window}; at least the new token itself is attended"
    resident = settings.resident_bytes
    yield resident is None or resident > 0, f"resident_bytes is {resident}; it must be above 0"


def _disk_checks(disk: DiskSettings) -> Iterator[Check]:
    yield (
        disk.page_bytes > 0 and disk.page_bytes % 8 == 0,
        f"page_bytes is {disk.page_bytes}; it must be a positive multiple of 8",
    )
    yield disk.gap_pages >= 0, f"gap_pages is {disk.gap_pages}; it cannot be negative"
    yield disk.tail_pages >= 1, f"tail_pages is {disk.tail_pages}; at least 1 is needed"
    yield disk.readers >= 1, f"readers is {disk.readers}; at least 1 is needed"
