"""What the store reports about itself: plain values for the command line and for tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

TierName = Literal["device", "host", "disk", "shared"]
TIERS: tuple[TierName, ...] = get_args(TierName)
"""The fastest first."""


@dataclass(frozen=True, slots=True)
class KindTotals:
    """How much is stored of one kind; `bytes` are file sizes, `heat` is the sum of the entries' frequencies (`eviction.py`)."""

    entries: int
    tokens: int
    bytes: int
    heat: float


@dataclass(frozen=True, slots=True)
class TierTotals:
    """How much one tier holds and may hold, and how many look-ups it has served.

    For device and host, this is what this process holds. For the shared tier it is what this machine knows of this namespace.
    `waiting` entries are still to be put there or deleted. `state` says whether the tier is in use and answers.
    """

    entries: int
    bytes: int
    limit_bytes: int
    hits: int
    waiting: int = 0
    state: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The state of one store folder, over all models and namespaces; sizes and limit are the disk's.

    `by_kind` has a row per kind that occurs, of KV and of features, `by_tier` one per tier. `hits` and `misses` count
    look-ups of spans and features, `damaged` the files that failed their checks, `evicted` the entries dropped to make room or
    as surplus versions. All are since the store was created, of what the processes using it have written so far. Each
    process writes from time to time and on closing.
    """

    entries: int
    tokens: int
    bytes: int
    limit_bytes: int
    by_kind: Mapping[str, KindTotals]
    by_tier: Mapping[TierName, TierTotals]
    hits: int
    misses: int
    damaged: int
    evicted: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check of every file found and repaired.

    `checked` entries were read in full. `damaged` says for each dropped entry what was wrong. `newer` names files of a newer
    format version and `unopened` files that could not be opened this time; both are left alone. `swept_files` files that no
    entry listed were removed. `miscounted` if the counters did not match the rows, or a row the size of its file; both
    were corrected. `shared_checked` and `shared_damaged` are the same for the shared tier, where damaged entries are deleted;
    `shared_reconciled` rows about it were wrong.
    """

    checked: int = 0
    damaged: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    unopened: tuple[str, ...] = ()
    swept_files: int = 0
    miscounted: bool = False
    shared_checked: int = 0
    shared_damaged: tuple[str, ...] = ()
    shared_reconciled: int = 0

    @property
    def sound(self) -> bool:
        """Whether every entry that this version can read was read, and nothing was wrong with any of them.

        Damaged entries are dropped, so the next check finds them no more.
        """
        return not (self.damaged or self.unopened or self.shared_damaged or self.miscounted)
