"""Which clusters are in memory, and in which frames; makes room by the replacement order.

What is pinned stays. Knows nothing of files: whoever puts a cluster here has filled its frames.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvweave.decode.clusters.table import Key
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.residency.frames import FrameNumbers
from kvweave.decode.residency.replacement import REPLACEMENTS, Known
from kvweave.errors import InvalidRequest

F = TypeVar("F", bound=FrameNumbers)
Layers = TypeVar("Layers", int, NDArray[np.int64])

_NEVER = -(2**40)  # a row long before the first
_BATCH = 16  # room is made for one of so many frames at once: to look for it costs more than a frame


class Residents(Generic[F]):
    """Clusters in memory by key. `row` is the clock and `turn` the layer that attends, set by whoever steps."""

    def __init__(self, frames: F, replacement: str, counts: DecodeCounts, layers: int) -> None:
        self.frames = frames
        self._layers = layers
        self.row = 0
        self.turn = -1
        self.busy: set[Key] = set()  # being read: their frames must not be given to others
        self.outside: Callable[[], int] = lambda: 0  # frames in use that hold no whole cluster
        self.finish_reads: Callable[[], None] = lambda: None  # waits until nothing is busy
        self.more_frames: Callable[[], None] = lambda: None  # what nothing else needs now
        self.give_outside: Callable[[], bool] = lambda: False  # one of `outside` leaves; False if none does
        self._order = REPLACEMENTS[replacement]
        self._counts = counts
        self._place: dict[Key, int] = {}
        self._keys: list[Key | None] = []
        self._held: list[list[int]] = []
        self._free: list[int] = []
        self._pinned: set[Key] = set()
        self._unused: set[Key] = set()  # fetched ahead and not asked for yet
        # Of each place: used_at, updated_at, uses, pages, layer, asked_at
        self._facts: NDArray[np.int64] = np.zeros((6, 0), np.int64)

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those that are not here."""
        return [key for key in keys if key not in self._place]

    def present(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many are here because they were asked for before, and how many are only fetched ahead."""
        here = self._place.keys() & keys
        ahead = len(here & self._unused)
        return len(here) - ahead, ahead

    def frames_of(self, key: Key) -> list[int]:
        """The frames of a cluster in memory, in the order of its pages; the caller may append to it."""
        return self._held[self._place[key]]

    def put(self, key: Key, frames: list[int], *, ahead: bool = False) -> None:
        """Note that a cluster lies in these frames from now on; `ahead`: it was not asked for yet."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self._place[key], self._keys[place], self._held[place] = place, key, frames
        asked_at = self._attended_at(key[0])  # as if: its layer has not done without it yet
        self._facts[:, place] = (self.row, _NEVER, 0, len(frames), key[0], asked_at)
        if ahead:
            self._unused.add(key)

    def drop(self, key: Key) -> list[int]:
        """Forget a cluster and return its frames, which are the caller's then."""
        place = self._place.pop(key)
        self._keys[place] = None
        self._free.append(place)
        self._pinned.discard(key)
        if key in self._unused:
            self._unused.discard(key)
            self._counts.prefetch_unused += 1
        frames, self._held[place] = self._held[place], []
        return frames

    def use(self, keys: Sequence[Key]) -> None:
        """Note that those of these clusters that are in memory are attended to now."""
        places = [place for key in keys if (place := self._place.get(key)) is not None]
        self._facts[0, places] = self._facts[5, places] = self.row
        self._facts[2, places] += 1
        self._unused.difference_update(keys)

    def update(self, key: Key) -> None:
        """Note that a cluster was given an entry or made by a split; nothing where it is not in memory."""
        place = self._place.get(key)
        if place is not None:
            self._facts[1, place] = self.row
            self._facts[3, place] = len(self._held[place])

    def state(self) -> list[tuple[Key, list[int]]]:
        """Each cluster and what the replacement order knows of it, in the order they came."""
        return [(key, self._facts[:, place].tolist()) for key, place in self._place.items()]

    def recall(self, key: Key, facts: list[int]) -> None:
        """Give a cluster in memory the facts that `state` gave."""
        self._facts[:, self._place[key]] = facts

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep these in memory until `release`."""
        self._pinned.update(keys)

    def next_row(self) -> None:
        """A pass begins: no layer has attended yet."""
        self.row += 1
        self.turn = -1

    def release(self) -> None:
        """Let go of all that is pinned."""
        self._pinned.clear()

    def evictable(self) -> int:
        """Frames of clusters that may leave; does not look at each of them."""
        staying = self._place.keys() & (self._pinned | self.busy)
        held = sum(len(self._held[self._place[key]]) for key in staying)
        return self.frames.count - self.frames.free - self.outside() - held

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
        if self.frames.free < number and self.busy:
            self.finish_reads()
            self._make_room(number)
        while self.frames.free < number and self.give_outside():
            self._make_room(number)
        if self.frames.free < number:
            held = self.frames.count - self.frames.free
            raise InvalidRequest(
                f"{number} pages of KV are needed in memory at once, but {held} of {self.frames.count} hold what must "
                f"stay; allow at least {(number + held - self.frames.count) * self.frames.page_bytes} more resident_bytes"
            )

    def _make_room(self, number: int) -> None:
        leaving = np.ones(len(self._keys), np.bool_)
        leaving[[self._place[key] for key in self._place.keys() & (self._pinned | self.busy)]] = False
        places = np.fromiter(self._place.values(), np.int64, len(self._place))
        places = places[leaving[places]]
        if not places.size:
            return
        used_at, updated_at, uses, pages, layer, asked_at = self._facts[:, places]
        missed = self._attended_at(layer) - asked_at
        until = (layer - self.turn - 1) % self._layers / self._layers
        last = self._order(
            Known(used_at, updated_at, uses, pages, missed, until, self.row, self.frames.count)
        )
        for index in np.argsort(-last, kind="stable"):
            if self.frames.free >= number:
                return
            key = self._keys[places[index]]
            assert key is not None
            self.frames.give(self.drop(key))

    def _attended_at(self, layer: Layers) -> Layers:
        """The row at which a layer last attended, or attends."""
        return self.row - (layer > self.turn)

    def _grow(self) -> None:
        more = max(64, len(self._keys))
        self._free.extend(range(len(self._keys) + more - 1, len(self._keys) - 1, -1))
        self._keys += [None] * more
        self._held += [[] for _ in range(more)]
        self._facts = np.concatenate([self._facts, np.zeros((6, more), np.int64)], axis=1)
