"""Which clusters are in memory, and in which frames; makes room by the replacement order.

What is pinned or being read stays. Array work over all clusters that are asked for. Knows nothing of files: whoever
puts a cluster here has filled its frames, or is filling them.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import Key, Keys, as_keys, named
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.page_cache.frames import REPLACEMENTS, FrameNumbers, Known, rows_of
from kvweave.errors import InvalidRequest

F = TypeVar("F", bound=FrameNumbers)
Layers = TypeVar("Layers", int, NDArray[np.int64])

_NEVER = -(2**40)  # a row long before the first
_BATCH = 16  # room is made for one of so many frames at once: to look for it costs more than a frame
_COLUMNS = 64
_PINNED, _READ = 1, 2  # why a cluster stays
# Rows of what is known of each place.
_USED_AT, _UPDATED_AT, _USES, _PAGES, _ASKED_AT, _CAME = range(6)
_TOLD = 5  # of them are told by `state`: the last is an order, which putting again restores


class Residents(Generic[F]):
    """Clusters in memory by key. `row` is the clock and `turn` the layer that attends, set by whoever steps."""

    def __init__(self, frames: F, replacement: str, counts: DecodeCounts, layers: int, heads: int) -> None:
        self.frames = frames
        self.row = 0
        self.turn = -1
        self.outside: Callable[[], int] = lambda: 0  # frames in use that hold no whole cluster
        self.finish_reads: Callable[[], None] = lambda: None  # waits until nothing is being read
        self.more_frames: Callable[[], None] = lambda: None  # what nothing else needs now
        self.give_outside: Callable[[], bool] = lambda: False  # one of `outside` leaves; False if none does
        # A cluster leaves whose last page is nowhere else: takes that page's frame over.
        self.keep_last: Callable[[Key, int], None] = lambda key, frame: None
        self._layers = layers
        self._order = REPLACEMENTS[replacement]
        self._counts = counts
        self._places: NDArray[np.int64] = np.full((layers, heads, 0), -1)
        self._came = 0
        self._free: list[int] = []
        self._pinned: list[NDArray[np.int64]] = []
        self._staying_pages = 0
        # Of each place:
        self._held: list[list[int]] = []
        self._keys: NDArray[np.int64] = np.zeros((0, 3), np.int64)
        self._facts: NDArray[np.int64] = np.zeros((6, 0), np.int64)
        self._stays: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._unused: NDArray[np.bool_] = np.zeros(0, np.bool_)  # fetched ahead and not asked for yet
        self._unwritten: NDArray[np.bool_] = np.zeros(0, np.bool_)  # the last page is not on flash
        self._taken: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __contains__(self, key: Key) -> bool:
        return self._place(key) >= 0

    # What is here

    def missing(self, keys: Keys) -> NDArray[np.int64]:
        """Those that are not here, (m, 3)."""
        keys = as_keys(keys)
        return keys[self._places_of(keys) < 0]

    def present(self, keys: Keys) -> tuple[int, int]:
        """How many are here because they were asked for before, and how many are only fetched ahead."""
        here = self._here(keys)
        ahead = int(self._unused[here].sum())
        return len(here) - ahead, ahead

    def frames_of(self, key: Key) -> list[int]:
        """The frames of a cluster in memory, in the order of its pages; to be read only."""
        return self._held[self._known(key)]

    def all_frames(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The frames (p,) of clusters that are all in memory, one after the other, and how many each has, (n,)."""
        places = self._all_known(keys)
        counts = self._facts[_PAGES, places]
        own = chain.from_iterable([self._held[place] for place in places.tolist()])
        return np.fromiter(own, np.int64, int(counts.sum())), counts

    def put(self, key: Key, frames: list[int], *, ahead: bool = False, unwritten: bool = False) -> None:
        """Note that a cluster lies in these frames from now on, with its last page nowhere else if it is `unwritten`.

        `ahead`: it was not asked for yet.
        """
        if not self._free:
            self._grow()
        self._widen(key[2] + 1)
        place = self._free.pop()
        self._places[key] = place
        self._keys[place], self._held[place], self._taken[place] = key, frames, True
        asked_at = self._attended_at(key[0])  # as if: its layer has not done without it yet
        self._came += 1
        self._facts[:, place] = (self.row, _NEVER, 0, len(frames), asked_at, self._came)
        self._unused[place], self._unwritten[place] = ahead, unwritten

    def drop(self, key: Key) -> list[int]:
        """Forget a cluster and return its frames, which are the caller's then."""
        place = self._known(key)
        self._places[key] = -1
        self._free.append(place)
        if self._stays[place]:
            self._staying_pages -= int(self._facts[_PAGES, place])
            self._stays[place] = 0
        self._counts.prefetch_unused += int(self._unused[place])
        self._unused[place] = self._unwritten[place] = self._taken[place] = False
        frames, self._held[place] = self._held[place], []
        return frames

    def use(self, keys: Keys) -> None:
        """Note that those of these clusters that are in memory are attended to now."""
        here = self._here(keys)
        self._facts[_USED_AT, here] = self._facts[_ASKED_AT, here] = self.row
        self._facts[_USES, here] += 1
        self._unused[here] = False

    def update(self, key: Key, frame: int | None = None) -> None:
        """Note that a cluster in memory was given an entry or made by a split; `frame` is a page more that it has."""
        place = self._known(key)
        self._facts[_UPDATED_AT, place] = self.row
        if frame is not None:
            self._held[place].append(frame)
            self._facts[_PAGES, place] += 1
            self._staying_pages += bool(self._stays[place])

    # Whether flash has all of it

    def set_unwritten(self, key: Key, unwritten: bool) -> None:
        """Note whether the last page of a cluster in memory is nowhere else."""
        self._unwritten[self._known(key)] = unwritten

    def unwritten(self) -> list[Key]:
        """Clusters whose last page is here alone, in the order they came."""
        return named(self._keys[self._in_order(self._taken & self._unwritten)])

    # What a text is kept with

    def state(self) -> list[tuple[Key, list[int]]]:
        """Each cluster and what is known of it, in the order they came."""
        places = self._in_order(self._taken)
        facts = np.concatenate([self._facts[:_TOLD, places], self._unwritten[None, places]])
        return list(zip(named(self._keys[places]), facts.T.tolist(), strict=True))

    def recall(self, key: Key, facts: list[int]) -> None:
        """Give a cluster in memory the facts that `state` gave."""
        place = self._known(key)
        self._facts[:_TOLD, place] = facts[:_TOLD]
        self._unwritten[place] = facts[_TOLD]

    # What must stay

    def pin(self, keys: Keys) -> None:
        """Keep those of these that are in memory there until `release`."""
        here = self._here(keys)
        self._stay(here, _PINNED)
        self._pinned.append(here)

    def release(self) -> None:
        """Let go of all that is pinned."""
        for places in self._pinned:
            self._go(places[self._stays[places] & _PINNED > 0], _PINNED)
        self._pinned.clear()

    def begin_reads(self, keys: Keys) -> None:
        """The frames of these are being read into: they must not be given to others."""
        self._stay(self._all_known(keys), _READ)

    def end_reads(self, keys: Keys) -> None:
        """They have been read."""
        self._go(self._all_known(keys), _READ)

    def being_read(self, keys: Keys) -> NDArray[np.int64]:
        """Those of these clusters that are being read, (m, 3)."""
        keys = as_keys(keys)
        places = self._places_of(keys)
        here = places >= 0
        here[here] = self._stays[places[here]] & _READ > 0
        return keys[here]

    def next_row(self) -> None:
        """A pass begins: no layer has attended yet."""
        self.row += 1
        self.turn = -1

    # Room

    def evictable(self) -> int:
        """Frames of clusters that may leave."""
        return self.frames.count - self.frames.free - self.outside() - self._staying_pages

    def room(self, number: int) -> list[int]:
        """So many free frames, for which other clusters leave if need be.

        Raises InvalidRequest if what must stay leaves no room: `resident_bytes` is too small.
        """
        self.make_free(number)
        return self.frames.take(number)

    def make_free(self, number: int) -> None:
        """Have so many frames free, as `room` does, without taking them."""
        if self.frames.free < number:
            self.more_frames()
        if self.frames.free < number:
            self._make_room(max(number, self.frames.count // _BATCH))
        if self.frames.free < number and (self._stays & _READ).any():
            self.finish_reads()
            self._make_room(number)
        while self.frames.free < number and self.give_outside():
            pass
        if self.frames.free < number:
            held = self.frames.count - self.frames.free
            raise InvalidRequest(
                f"{number} pages of KV are needed in memory at once, but {held} of {self.frames.count} hold what must "
                f"stay; allow at least {(number + held - self.frames.count) * self.frames.page_bytes} more resident_bytes"
            )

    def _make_room(self, number: int) -> None:
        places = self._in_order(self._taken & (self._stays == 0))
        if not places.size:
            return
        used_at, updated_at, uses, pages, asked_at, _ = self._facts[:, places]
        layers = self._keys[places, 0]
        missed = self._attended_at(layers) - asked_at
        until = (layers - self.turn - 1) % self._layers / self._layers
        last = self._order(
            Known(used_at, updated_at, uses, pages, missed, until, self.row, self.frames.count)
        )
        for place in places[np.argsort(-last, kind="stable")]:
            if self.frames.free >= number:
                return
            layer, head, cluster = self._keys[place].tolist()
            key = (layer, head, cluster)
            unwritten = self._unwritten[place]
            frames = self.drop(key)
            if unwritten:
                self.keep_last(key, frames.pop())
            self.frames.give(frames)

    def _attended_at(self, layer: Layers) -> Layers:
        """The row at which a layer last attended, or attends."""
        return self.row - (layer > self.turn)

    # Places

    def _place(self, key: Key) -> int:
        """Where a cluster is, −1 if it is not here."""
        layer, head, cluster = key
        return int(self._places[layer, head, cluster]) if cluster < self._places.shape[2] else -1

    def _known(self, key: Key) -> int:
        """Where a cluster is that is here."""
        place = self._place(key)
        assert place >= 0, f"cluster {key} is not in memory"
        return place

    def _all_known(self, keys: Keys) -> NDArray[np.int64]:
        """Where clusters are that are all here, (n,)."""
        places = self._places_of(as_keys(keys))
        assert (places >= 0).all(), "some of the clusters are not in memory"
        return places

    def _places_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where clusters are, (n,), −1 for those that are not here."""
        layers, heads, clusters = keys.T
        self._widen(int(clusters.max(initial=-1)) + 1)
        found: NDArray[np.int64] = self._places[layers, heads, clusters]
        return found

    def _here(self, keys: Keys) -> NDArray[np.int64]:
        """The places of those that are here."""
        places = self._places_of(as_keys(keys))
        return places[places >= 0]

    def _in_order(self, some: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The places marked, in the order in which clusters came to them."""
        places = np.flatnonzero(some)
        return places[np.argsort(self._facts[_CAME, places])]

    def _stay(self, places: NDArray[np.int64], reason: int) -> None:
        self._staying_pages += int(self._facts[_PAGES, places[self._stays[places] == 0]].sum())
        self._stays[places] |= reason

    def _go(self, places: NDArray[np.int64], reason: int) -> None:
        self._stays[places] &= ~np.uint8(reason)
        self._staying_pages -= int(self._facts[_PAGES, places[self._stays[places] == 0]].sum())

    def _widen(self, columns: int) -> None:
        """Have room for clusters of so high numbers."""
        more = columns - self._places.shape[2]
        if more > 0:
            more = max(more, _COLUMNS, self._places.shape[2] // 2)
            self._places = np.pad(self._places, ((0, 0), (0, 0), (0, more)), constant_values=-1)

    def _grow(self) -> None:
        """More places."""
        have = len(self._held)
        more = max(64, have)
        self._free.extend(range(have + more - 1, have - 1, -1))
        self._held += [[] for _ in range(more)]
        self._keys = np.pad(self._keys, ((0, more), (0, 0)))
        self._facts = np.pad(self._facts, ((0, 0), (0, more)))
        self._stays = np.pad(self._stays, (0, more))
        self._unused, self._unwritten, self._taken = (
            np.pad(array, (0, more)) for array in (self._unused, self._unwritten, self._taken)
        )


class DevicePages:
    """`count` pages on `device`, `pages` (count, page bytes) uint8, and the clusters that lie in them."""

    def __init__(
        self, device: torch.device, count: int, page_bytes: int, replacement: str, layers: int, heads: int
    ) -> None:
        self.pages = torch.zeros(count, page_bytes, dtype=torch.uint8, device=device)
        self.residents = Residents(
            FrameNumbers(count, page_bytes), replacement, DecodeCounts(), layers, heads
        )

    def missing(self, keys: Keys) -> NDArray[np.int64]:
        """Those that are not here; the others stay until the residents' `release`."""
        self.residents.pin(keys)
        return self.residents.missing(keys)

    def copy(self, key: Key, memory: Tensor, frames: Sequence[int]) -> None:
        """Bring a cluster here from these frames of `memory` (n, page bytes); it stays until the residents' `release`."""
        own = self.residents.room(len(frames))
        self.pages[own] = rows_of(memory, torch.tensor(frames, dtype=torch.long)).to(self.pages.device)
        self.residents.put(key, own)
        self.residents.pin([key])

    def forget(self, key: Key) -> None:
        """The cluster has changed: the copy here, if there is one, is none any more."""
        if key in self.residents:
            self.residents.frames.give(self.residents.drop(key))
