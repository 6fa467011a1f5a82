"""How a long text is decoded within bounded memory: one value for the whole, one for each technique.

Every technique can be switched off by itself, which is how its worth is measured. Defaults stand beside the paper's
values where it gives any (DynaKV, arXiv 2511.07427).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from kvweave.config import DecodingConfig
from kvweave.errors import InvalidRequest
from kvweave.types import Storage

PAGE_BYTES = 4096
"""What flash is written in, and what direct reads are aligned to."""

MEMORY_SHARE = 0.3
"""The bound of KV in memory that measurements take where none is given, as a share of what all KV takes."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How entries are grouped (DynaKV §4).

    `mean_entries`: the size of clusters aimed at where many are made at once; `max_entries`: a cluster that grows
    beyond is split. `spread`: a cluster may vary this many times as much as the head's clusters do on the mean when
    they are made (c in τ = c · mean; the paper leaves it open). `buffer_entries`: how many newcomers of flagged
    clusters a head holds back until the cluster is in memory (Bmax, the paper's 16); `split` "immediate" loads the
    cluster at once instead. `candidates`: clusters are retrieved until they hold this many times what may be attended to,
    and the best of their entries are attended to; 1 attends to whole clusters, None is the strategy's own (1.8 for
    dynakv, 1 for others). `local_entries`: how many newcomers the local strategy gathers before it clusters them.
    """

    mean_entries: int = 32
    max_entries: int = 128
    spread: float = 1.5
    candidates: float | None = None
    buffer_entries: int = 16
    split: Literal["delayed", "immediate"] = "delayed"
    local_entries: int = 128


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How clusters lie on flash and are read (DynaKV §5).

    `order`: which clusters become neighbours when they are first written, those that are retrieved together or those
    that were made one after the other. `layout`: "dual-head" places two clusters in a pool of twice the largest
    size, each growing inward; "packed" leaves no room, so that all behind a growing cluster move. `tail_pages`: half
    filled pages that a head keeps in memory when their clusters leave it. `gap_pages`: a gap up to this length between two pages is read through
    instead of starting another read. `direct`: past the page cache, where the file system allows it. `readers`:
    reads in flight.
    """

    order: Literal["together", "made"] = "together"
    layout: Literal["dual-head", "packed"] = "dual-head"
    tail_pages: int = 4
    gap_pages: int = 2
    direct: bool = True
    readers: int = 4
    page_bytes: int = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PageCacheSettings:
    """What stays in memory (DynaKV §6).

    `replacement`: which clusters go first when room is needed; "cluster" are large ones and those not updated of
    late. `prefetch`: how many layers ahead clusters are fetched, 0 or 1. `representatives`: "paged" holds one layer's
    centroids at a time, "resident" all.
    """

    replacement: Literal["cluster", "lru", "lfu"] = "cluster"
    prefetch: Literal[0, 1] = 1
    representatives: Literal["paged", "resident"] = "paged"


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The whole of it: hand this to `generate`.

    Args:
        kv_budget: entries that a step attends to, per layer and KV head: a share of those stored where it is at most 1,
            else a number. Sinks, the recent window and buffered entries count. A pass of several rows attends to its
            own rows besides.
        resident_bytes: hard bound of the KV held in memory, over all layers: windows, buffers, pages, centroids and
            the portion that is being attended to. None holds whatever fits the model's context.
        device_bytes: hard bound of the clusters that the model's device holds copies of, besides. None: what is attended to
            is copied there in every step. Of use where the device is not the CPU.
        strategy: a name in STRATEGIES.
        folder: where the files lie while decoding; None is the system's temporary folder, which should not be memory.
        sinks: first positions of the text, always attended.
        window: latest positions, always attended; less where the budget is small.
        storage: how keys and values are kept; "exact" is in the model's own dtype.
        clusters, flash, residency: the three techniques.

    Raises InvalidRequest for values that cannot be honoured.
    """

    kv_budget: float = 0.15
    resident_bytes: int | None = None
    device_bytes: int | None = None
    strategy: str = "dynakv"
    folder: Path | None = None
    sinks: int = 4
    window: int = 64
    storage: Storage = "exact"
    clusters: ClusterSettings = field(default_factory=ClusterSettings)
    flash: DiskSettings = field(default_factory=DiskSettings)
    residency: PageCacheSettings = field(default_factory=PageCacheSettings)

    def __post_init__(self) -> None:
        checks = [
            (
                0 < self.kv_budget < math.inf,
                f"kv_budget is {self.kv_budget}; it is a share in (0, 1] or a number of entries",
            ),
            (
                self.kv_budget <= 1 or self.kv_budget % 1 == 0,
                f"kv_budget is {self.kv_budget}; above 1 it is a number of entries, which must be whole",
            ),
            (
                self.kv_budget <= 1 or self.kv_budget >= self.sinks + MIN_ENTRIES,
                f"kv_budget is {self.kv_budget:g} entries; with {self.sinks} sinks at least {self.sinks + MIN_ENTRIES} "
                "are needed",
            ),
            (self.sinks >= 0, f"sinks is {self.sinks}; it cannot be negative"),
            (self.window >= 1, f"window is {self.window}; at least the new token itself is attended"),
            (
                self.resident_bytes is None or self.resident_bytes > 0,
                f"resident_bytes is {self.resident_bytes}; it must be above 0",
            ),
            (
                self.device_bytes is None or self.device_bytes > 0,
                f"device_bytes is {self.device_bytes}; it must be above 0",
            ),
            (
                1 <= self.clusters.mean_entries <= self.clusters.max_entries,
                f"clusters of {self.clusters.mean_entries} entries on the mean and {self.clusters.max_entries} at most; "
                "the first must be at least 1 and not above the second",
            ),
            (self.clusters.max_entries >= 2, f"max_entries is {self.clusters.max_entries}; a split needs 2"),
            (
                self.clusters.candidates is None or 1 <= self.clusters.candidates < math.inf,
                f"candidates is {self.clusters.candidates}; clusters hold at least 1 times what is attended to",
            ),
            (self.clusters.buffer_entries >= 0, f"buffer_entries is {self.clusters.buffer_entries}"),
            (
                0 < self.clusters.spread < math.inf,
                f"spread is {self.clusters.spread}; it must be a number above 0",
            ),
            (
                self.clusters.local_entries >= 1,
                f"local_entries is {self.clusters.local_entries}; at least 1 is needed",
            ),
            (
                self.flash.page_bytes > 0 and self.flash.page_bytes % 8 == 0,
                f"page_bytes is {self.flash.page_bytes}; it must be a positive multiple of 8",
            ),
            (self.flash.gap_pages >= 0, f"gap_pages is {self.flash.gap_pages}; it cannot be negative"),
            (self.flash.tail_pages >= 1, f"tail_pages is {self.flash.tail_pages}; at least 1 is needed"),
            (self.flash.readers >= 1, f"readers is {self.flash.readers}; at least 1 is needed"),
        ]
        checks += [
            (
                getattr(part, name) in get_args(kind),
                f"{name} is {getattr(part, name)!r}; it is one of {', '.join(map(repr, get_args(kind)))}",
            )
            for part in (self, self.clusters, self.flash, self.residency)
            for name, kind in get_type_hints(type(part)).items()
            if get_origin(kind) is Literal
        ]
        for holds, message in checks:
            if not holds:
                raise InvalidRequest(message)


def asked_for(wanted: DecodingConfig, folder: Path) -> OffloadSettings | None:
    """What settings ask for, with files in `folder`; None for all KV in memory. Without a budget everything is attended."""
    if wanted.kv_budget is None and wanted.resident_bytes is None:
        return None
    budget = 1.0 if wanted.kv_budget is None else wanted.kv_budget
    return OffloadSettings(budget, wanted.resident_bytes, folder=folder)


MIN_ENTRIES = 8
"""Fewest entries beyond the sinks that a step attends to, whatever share is asked for."""
