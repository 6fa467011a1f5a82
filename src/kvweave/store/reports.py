"""What the store says about itself: plain values for the command line and for tests."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KindTotals:
    """How much is stored of one kind; `bytes` are file sizes."""

    entries: int
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The state of one store folder, over all models and namespaces.

    `by_kind` has a row per kind that occurs, of KV and of notes. `hits` and `misses` count the spans and notes
    looked up, `damaged` the files that failed their checks, `evicted` the entries dropped for room or as one
    version too many: all since the store was made, as far as the processes using it have reported (each does
    so now and then, and on closing).
    """

    entries: int
    tokens: int
    bytes: int
    limit_bytes: int
    by_kind: Mapping[str, KindTotals]
    hits: int
    misses: int
    damaged: int
    evicted: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check of every file found and mended.

    `checked` entries were read in full. `damaged` says for each dropped entry what was wrong; `newer` names
    files of a newer format version and `unopened` files that could not be opened this time, which are left
    alone. `swept_files` that no entry listed were removed.
    """

    checked: int
    damaged: tuple[str, ...]
    newer: tuple[str, ...]
    unopened: tuple[str, ...]
    swept_files: int

    @property
    def sound(self) -> bool:
        """Whether every entry that this version can read was read, and nothing was wrong with any.

        After damage the entries are dropped: the next check is sound, unless there is more amiss.
        """
        return not self.damaged and not self.unopened
