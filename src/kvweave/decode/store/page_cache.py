"""The page cache: which clusters are in memory, in which frames, and which are evicted to make room, by a policy.

Pinned clusters, and those being read, stay. Works on arrays over all requested clusters. Knows nothing of files: the
caller fills a cluster's frames.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.cluster_table import ClusterKey, ClusterKeys, key_array, key_list
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.store.frames import FramePool
from kvweave.decode.store.tail_pages import TailPages
from kvweave.errors import InvalidRequest

EvictionScores = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
"""One score per cluster, (n,); clusters with the largest are evicted first."""

UPDATED_ROWS = 16
"""A cluster counts as recently updated for this many rows; the paper tracks updates as long (Table 2)."""
UPDATED_SHARE = 0.25
"""Recently updated clusters are protected up to this share of the frames."""


@dataclass(frozen=True, slots=True)
class ClusterUsage:
    """Usage of clusters in memory, arrays (n,).

    Attributes:
        used_at, updated_at: row of the last use, and of the last update.
        uses: number of uses.
        pages: size in pages.
        missed: how often the cluster's layer has attended without it since its last use.
        until_next: share of a row until the cluster's layer attends again, in [0, 1).
        now: the current row.
        frames: number of all frames.
    """

    used_at: NDArray[np.int64]
    updated_at: NDArray[np.int64]
    uses: NDArray[np.int64]
    pages: NDArray[np.int64]
    missed: NDArray[np.int64]
    until_next: NDArray[np.float64]
    now: int
    frames: int


def cluster_scores(usage: ClusterUsage) -> EvictionScores:
    """Large clusters without recent use first; recently updated ones last, while they take a quarter of the frames at most.

    Size and age weigh alike: a cluster of twice the size must have been used twice as recently to stay. Layers attend in
    turn, so age is how often the cluster's own layer attended without it. Of two equals, the one whose layer attends
    later is evicted first.
    """
    scores = (1 + usage.missed + usage.until_next / 2) * usage.pages
    since = usage.now - usage.updated_at
    latest = np.argsort(since, kind="stable")
    within = np.cumsum(usage.pages[latest]) <= UPDATED_SHARE * usage.frames
    protected = latest[within & (since[latest] <= UPDATED_ROWS)]
    scores[protected] = -1.0 / (1.0 + since[protected])
    return scores


EvictionPolicy = Callable[[ClusterUsage], EvictionScores]

Layers = TypeVar("Layers", int, NDArray[np.int64])

_NEVER = -(2**40)  # a row long before the first
_EVICTED_SHARE = 16  # free at least 1/16 of the frames at once: finding victims costs more than a frame
_MIN_COLUMNS = 64
_MIN_SLOTS = 64
_PINNED, _READ = 1, 2  # reasons why a cluster stays
# Rows of a slot's facts. `state` returns all but the last, which `insert` sets again.
_USED_AT, _UPDATED_AT, _USES, _PAGES, _REQUESTED_AT, _INSERTED = range(6)
_STATE_FACTS = 5


class PageCache:
    """Clusters in memory, by key; each takes a slot.

    The caller sets `row`, the clock, and `current_layer`, the layer that attends; `ClusterReads` sets `wait_for_reads`,
    which waits until nothing is being read.

    Args:
        frames: where clusters are.
        eviction: which clusters are evicted first.
        counts: counts prefetched clusters that were evicted without being used.
        layers, heads: of the model.
        tails: takes over the frame of an evicted cluster's last page, if that is not on disk.
        reclaim_frames: restores withdrawn frames that are no longer needed elsewhere.
    """

    def __init__(
        self,
        frames: FramePool,
        eviction: EvictionPolicy,
        counts: DecodeCounts,
        layers: int,
        heads: int,
        tails: TailPages,
        reclaim_frames: Callable[[], None] = lambda: None,
    ) -> None:
        self.frames = frames
        self.row = 0
        self.current_layer = -1
        self.wait_for_reads: Callable[[], None] = lambda: None
        self._layers = layers
        self._eviction = eviction
        self._counts = counts
        self._tails = tails
        self._reclaim_frames = reclaim_frames
        self._slots: NDArray[np.int64] = np.full((layers, heads, 0), -1)  # of each cluster; −1: not in memory
        self._insertions = 0
        self._free: list[int] = []
        self._pinned: list[NDArray[np.int64]] = []
        self._staying_pages = 0
        # Of each slot:
        self._slot_frames: list[list[int]] = []
        self._keys: NDArray[np.int64] = np.zeros((0, 3), np.int64)
        self._facts: NDArray[np.int64] = np.zeros((6, 0), np.int64)
        self._stays: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._unused: NDArray[np.bool_] = np.zeros(0, np.bool_)  # prefetched, not requested yet
        self._unwritten: NDArray[np.bool_] = np.zeros(0, np.bool_)  # the last page is not on disk
        self._taken: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __contains__(self, key: ClusterKey) -> bool:
        return self._slot(key) >= 0

    # Look up

    def missing(self, keys: ClusterKeys) -> NDArray[np.int64]:
        """Return the clusters that are not in memory, (m, 3)."""
        keys = key_array(keys)
        return keys[self._slots_of(keys) < 0]

    def count_hits(self, keys: ClusterKeys) -> tuple[int, int]:
        """Return how many clusters are in memory since an earlier request, and how many because of a prefetch."""
        here = self._present_slots(keys)
        prefetched = int(self._unused[here].sum())
        return len(here) - prefetched, prefetched

    def frames_of(self, key: ClusterKey) -> list[int]:
        """Return the frames of a cluster in memory, in the order of its pages; read-only."""
        return self._slot_frames[self._known_slot(key)]

    def all_frames(self, keys: ClusterKeys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the frames (p,) of clusters that are all in memory, one after another, and each one's number (n,)."""
        slots = self._known_slots(keys)
        counts = self._facts[_PAGES, slots]
        frames = chain.from_iterable([self._slot_frames[slot] for slot in slots.tolist()])
        return np.fromiter(frames, np.int64, int(counts.sum())), counts

    def unwritten_keys(self) -> list[ClusterKey]:
        """Return the clusters whose last page is not on disk, in the order of insertion."""
        return key_list(self._keys[self._in_order(self._taken & self._unwritten)])

    # Insert, change, remove

    def insert(
        self, key: ClusterKey, frames: list[int], *, prefetched: bool = False, unwritten: bool = False
    ) -> None:
        """Insert a cluster with its frames; `unwritten`: its last page is not on disk."""
        if not self._free:
            self._add_slots()
        self._widen(key[2] + 1)
        slot = self._free.pop()
        self._slots[key] = slot
        self._keys[slot], self._slot_frames[slot], self._taken[slot] = key, frames, True
        requested_at = self._attended_at(key[0])  # its layer has not attended without it yet
        self._insertions += 1
        self._facts[:, slot] = (self.row, _NEVER, 0, len(frames), requested_at, self._insertions)
        self._unused[slot], self._unwritten[slot] = prefetched, unwritten

    def remove(self, key: ClusterKey) -> list[int]:
        """Remove a cluster and return its frames, which belong to the caller then."""
        slot = self._known_slot(key)
        self._slots[key] = -1
        self._free.append(slot)
        if self._stays[slot]:
            self._staying_pages -= int(self._facts[_PAGES, slot])
            self._stays[slot] = 0
        self._counts.prefetch_unused += int(self._unused[slot])
        self._unused[slot] = self._unwritten[slot] = self._taken[slot] = False
        frames, self._slot_frames[slot] = self._slot_frames[slot], []
        return frames

    def record_use(self, keys: ClusterKeys) -> None:
        """Record that these clusters, where they are in memory, are attended to now."""
        here = self._present_slots(keys)
        self._facts[_USED_AT, here] = self._facts[_REQUESTED_AT, here] = self.row
        self._facts[_USES, here] += 1
        self._unused[here] = False

    def record_update(self, key: ClusterKey, frame: int | None = None) -> None:
        """Record that a cluster in memory has changed; `frame` is an additional page."""
        slot = self._known_slot(key)
        self._facts[_UPDATED_AT, slot] = self.row
        if frame is not None:
            self._slot_frames[slot].append(frame)
            self._facts[_PAGES, slot] += 1
            self._staying_pages += bool(self._stays[slot])

    def set_unwritten(self, key: ClusterKey, unwritten: bool) -> None:
        """Set whether the last page of a cluster in memory is not on disk."""
        self._unwritten[self._known_slot(key)] = unwritten

    def next_row(self) -> None:
        """Start a pass: no layer has attended yet."""
        self.row += 1
        self.current_layer = -1

    # Persist

    def state(self) -> list[tuple[ClusterKey, list[int]]]:
        """Return each cluster and its facts, in the order of insertion."""
        slots = self._in_order(self._taken)
        facts = np.concatenate([self._facts[:_STATE_FACTS, slots], self._unwritten[None, slots]])
        return list(zip(key_list(self._keys[slots]), facts.T.tolist(), strict=True))

    def restore_facts(self, key: ClusterKey, facts: list[int]) -> None:
        slot = self._known_slot(key)
        self._facts[:_STATE_FACTS, slot] = facts[:_STATE_FACTS]
        self._unwritten[slot] = facts[_STATE_FACTS]

    # Keep in memory

    def pin(self, keys: ClusterKeys) -> None:
        """Pin these clusters, where they are in memory, until `unpin_all`."""
        here = self._present_slots(keys)
        self._keep(here, _PINNED)
        self._pinned.append(here)

    def unpin_all(self) -> None:
        for slots in self._pinned:
            self._let_leave(slots[self._stays[slots] & _PINNED > 0], _PINNED)
        self._pinned.clear()

    def mark_reading(self, keys: ClusterKeys) -> None:
        """Keep clusters whose frames are being read into."""
        self._keep(self._known_slots(keys), _READ)

    def unmark_reading(self, keys: ClusterKeys) -> None:
        self._let_leave(self._known_slots(keys), _READ)

    def being_read(self, keys: ClusterKeys) -> NDArray[np.int64]:
        """Return the clusters that are being read, (m, 3)."""
        keys = key_array(keys)
        slots = self._slots_of(keys)
        here = slots >= 0
        here[here] = self._stays[slots[here]] & _READ > 0
        return keys[here]

    # Make room

    def evictable_frames(self) -> int:
        """Return the number of frames of clusters that may be evicted."""
        return self.frames.count - self.frames.free_count - len(self._tails) - self._staying_pages

    def allocate(self, number: int) -> list[int]:
        """Allocate frames, evicting clusters if needed.

        Raises InvalidRequest if what must stay leaves too few: `resident_bytes` is too small.
        """
        self.ensure_free(number)
        return self.frames.allocate(number)

    def ensure_free(self, number: int) -> None:
        """Free frames as `allocate` does, without allocating them."""
        frames = self.frames
        if frames.free_count < number:
            self._reclaim_frames()
        if frames.free_count < number:
            self._evict(max(number, frames.count // _EVICTED_SHARE))
        if frames.free_count < number and (self._stays & _READ).any():
            self.wait_for_reads()
            self._evict(number)
        while frames.free_count < number and self._tails.evict_one():
            pass
        if frames.free_count < number:
            used = frames.count - frames.free_count
            raise InvalidRequest(
                f"{number} pages of KV are needed in memory at once, but {used} of {frames.count} hold what must "
                f"stay; allow at least {(number + used - frames.count) * frames.page_bytes} more resident_bytes"
            )

    def _evict(self, number: int) -> None:
        """Evict clusters until `number` frames are free, or no more may be evicted."""
        slots = self._in_order(self._taken & (self._stays == 0))
        if not slots.size:
            return
        for slot in slots[np.argsort(-self._eviction(self._usage(slots)), kind="stable")]:
            if self.frames.free_count >= number:
                return
            layer, head, cluster = self._keys[slot].tolist()
            key = (layer, head, cluster)
            unwritten = self._unwritten[slot]
            frames = self.remove(key)
            if unwritten:
                self._tails.add(key, frames.pop())
            self.frames.free(frames)

    def _usage(self, slots: NDArray[np.int64]) -> ClusterUsage:
        used_at, updated_at, uses, pages, requested_at, _ = self._facts[:, slots]
        layers = self._keys[slots, 0]
        missed = self._attended_at(layers) - requested_at
        until_next = (layers - self.current_layer - 1) % self._layers / self._layers
        return ClusterUsage(used_at, updated_at, uses, pages, missed, until_next, self.row, self.frames.count)

    def _attended_at(self, layer: Layers) -> Layers:
        """Return the row at which a layer last attended, or attends."""
        return self.row - (layer > self.current_layer)

    # Slots

    def _slot(self, key: ClusterKey) -> int:
        """Return the slot of a cluster, −1 if it is not in memory."""
        layer, head, cluster = key
        return int(self._slots[layer, head, cluster]) if cluster < self._slots.shape[2] else -1

    def _known_slot(self, key: ClusterKey) -> int:
        slot = self._slot(key)
        assert slot >= 0, f"cluster {key} is not in memory"
        return slot

    def _slots_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of clusters, (n,), −1 for those that are not in memory."""
        layers, heads, clusters = keys.T
        self._widen(int(clusters.max(initial=-1)) + 1)
        found: NDArray[np.int64] = self._slots[layers, heads, clusters]
        return found

    def _known_slots(self, keys: ClusterKeys) -> NDArray[np.int64]:
        """Return the slots of clusters that are all in memory, (n,)."""
        slots = self._slots_of(key_array(keys))
        assert (slots >= 0).all(), "some of the clusters are not in memory"
        return slots

    def _present_slots(self, keys: ClusterKeys) -> NDArray[np.int64]:
        """Return the slots of those clusters that are in memory."""
        slots = self._slots_of(key_array(keys))
        return slots[slots >= 0]

    def _in_order(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the slots in a mask, in the order of insertion."""
        slots = np.flatnonzero(mask)
        return slots[np.argsort(self._facts[_INSERTED, slots])]

    def _keep(self, slots: NDArray[np.int64], reason: int) -> None:
        self._staying_pages += int(self._facts[_PAGES, slots[self._stays[slots] == 0]].sum())
        self._stays[slots] |= reason

    def _let_leave(self, slots: NDArray[np.int64], reason: int) -> None:
        self._stays[slots] &= ~np.uint8(reason)
        self._staying_pages -= int(self._facts[_PAGES, slots[self._stays[slots] == 0]].sum())

    def _widen(self, columns: int) -> None:
        """Make room for clusters with numbers below `columns`."""
        more = columns - self._slots.shape[2]
        if more > 0:
            more = max(more, _MIN_COLUMNS, self._slots.shape[2] // 2)
            self._slots = np.pad(self._slots, ((0, 0), (0, 0), (0, more)), constant_values=-1)

    def _add_slots(self) -> None:
        count = len(self._slot_frames)
        more = max(_MIN_SLOTS, count)
        self._free.extend(range(count + more - 1, count - 1, -1))
        self._slot_frames += [[] for _ in range(more)]
        self._keys = np.pad(self._keys, ((0, more), (0, 0)))
        self._facts = np.pad(self._facts, ((0, 0), (0, more)))
        self._stays = np.pad(self._stays, (0, more))
        self._unused, self._unwritten, self._taken = (
            np.pad(array, (0, more)) for array in (self._unused, self._unwritten, self._taken)
        )
