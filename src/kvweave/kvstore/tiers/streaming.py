"""The rest of an entry that is used from its beginning on: it comes in pieces of some layers each, in the order of the layers.

A piece is read by whoever needs it first, the thread that goes through all of them in the background or the request that has
come to a layer; whoever else needs it waits for that piece only. Knows where layers lie, and nothing of what is in them: they
are verified when they are used (`store/layers.py`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from kvweave.errors import DamagedEntry
from kvweave.kvstore.format import LayerPlaces
from kvweave.kvstore.tiers.tier import Blob, Range

KEPT = 0.9
"""Each read counts so much less once another one has come: what is told is the pace of the last ten or so."""


class Bandwidth:
    """The pace of all reads from one place taken together, as several of them share a link. Safe to use from several threads.

    `clock` gives seconds from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._under_way = 0
        self._asked_bytes = 0  # at most, by all that is under way
        self._since_s = 0.0  # since then something is under way, and nothing has come
        self._seconds = self._bytes = 0.0

    def timed(self, read: Callable[[], Sequence[Blob] | None], most_bytes: int) -> Sequence[Blob] | None:
        """What `read` returns, at most so many bytes; how many, and how long they took, counts from now on."""
        with self._guard:
            if not self._under_way:
                self._since_s = self._clock()
            self._under_way += 1
            self._asked_bytes += most_bytes
        size = 0
        try:
            came = read()
            size = sum(map(len, came or ()))
        finally:
            with self._guard:
                self._under_way -= 1
                self._asked_bytes -= most_bytes
                if size:
                    self._came(size)
        return came

    def takes_s(self, size_bytes: float) -> float:
        """How long so many bytes take to come: no less than what should have come by now is late."""
        with self._guard:
            pace = self._seconds / self._bytes if self._bytes else 0.0  # s for each byte
            waited_s = self._clock() - self._since_s if self._under_way else 0.0
            return max(size_bytes * pace, waited_s - self._asked_bytes * pace)

    def _came(self, size_bytes: int) -> None:
        now_s = self._clock()
        self._seconds = KEPT * self._seconds + now_s - self._since_s
        self._bytes = KEPT * self._bytes + size_bytes
        self._since_s = now_s


PIECE_BYTES = 2**20
"""At least so much is asked for at once, so that round trips do not dominate; an entry of less comes whole."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that are asked for together, and what of them is to come: ranges of the entry, in ascending order."""

    layers: range
    ranges: tuple[Range, ...]


def pieces(places: LayerPlaces, there_bytes: int) -> list[Piece]:
    """What is to be asked for when the first `there_bytes` of an entry are there; layers that lie in these are in no piece."""
    made, size = list[Piece](), 0
    first = sum(max(end for _, end in layer) <= there_bytes for layer in places.layers)
    for index in range(first, len(places.layers)):
        size += sum(max(0, end - max(begin, there_bytes)) for begin, end in places.layers[index])
        if size >= PIECE_BYTES or index == len(places.layers) - 1:
            made.append(_piece(places, range(first, index + 1), there_bytes))
            first, size = index + 1, 0
    return made


def _piece(places: LayerPlaces, layers: range, there_bytes: int) -> Piece:
    ranges = list[Range]()
    for (begin, _), (_, end) in zip(places.layers[layers[0]], places.layers[layers[-1]], strict=True):
        begin = max(begin, there_bytes)
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        elif begin < end:
            ranges.append((begin, end))
    return Piece(layers, tuple(ranges))


class StreamingEntry:
    """The layers of one entry that are still to come (`layers.Coming`). Safe to use from several threads.

    Args:
        data: room for the entry's bytes (n,) uint8, its beginning filled; the rest is written here, piece by piece.
        missing: what is to come, by `pieces`; not empty.
        read: gives what lies in these ranges, None where it cannot be had.
        pace: how fast bytes come from there.
        broken_off: called, in whichever thread, before DamagedEntry is raised over a piece that cannot be had.
        where: names the entry in errors.
    """

    def __init__(
        self,
        data: Tensor,
        missing: Sequence[Piece],
        read: Callable[[Sequence[Range]], Sequence[Blob] | None],
        pace: Bandwidth,
        broken_off: Callable[[], object],
        where: str,
    ) -> None:
        self._bytes = data.numpy()
        self._pieces = missing
        self._piece_of = {layer: number for number, piece in enumerate(missing) for layer in piece.layers}
        self._read = read
        self._pace = pace
        self._broken_off = broken_off
        self._where = where
        self._states: list[Literal["absent", "coming", "there"]] = ["absent"] * len(missing)
        self._lost = False
        self._changed = threading.Condition()

    @property
    def whole(self) -> bool:
        """Whether everything is there."""
        return all(state == "there" for state in self._states)

    @property
    def awaited_s(self) -> float:
        """How long a layer takes to come at the pace of the link; 0 once everything is there."""
        layers = self._pieces[-1].layers.stop
        return 0.0 if self.whole else self._pace.takes_s(len(self._bytes) / layers)

    def wait_for(self, layer: int) -> None:
        """Return when a layer is there: read its piece, or wait for whoever does. Raises DamagedEntry if it cannot be had."""
        number = self._piece_of.get(layer)
        if number is not None:
            self._have(number)

    def advance(self) -> bool:
        """Have the next piece that is missing; returns whether everything is there now. Raises DamagedEntry as `wait_for`."""
        for number, state in enumerate(self._states):
            if state != "there":
                self._have(number)
                break
        return self.whole

    def _have(self, number: int) -> None:
        while self._states[number] != "there":
            mine = came = False
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._lost or self._states[number] != "coming")
                    if self._states[number] == "absent" and not self._lost:
                        mine = True
                        self._states[number] = "coming"
                if mine:
                    came = self._fill(self._pieces[number].ranges)
            finally:  # after an interrupt of this thread others may still want it
                if mine:
                    with self._changed:
                        self._states[number] = "there" if came else "absent"
                        self._changed.notify_all()
            if self._lost and self._states[number] != "there":
                raise DamagedEntry(f"the rest of {self._where} cannot be had any more")

    def _fill(self, ranges: Sequence[Range]) -> bool:
        """Read a piece into its place; False if that cannot be had, and then nothing more comes."""
        parts = self._read(ranges)
        if parts is None or list(map(len, parts)) != [end - begin for begin, end in ranges]:
            self._broken_off()  # first: whoever is told that it is lost must not get it again
            self._lost = True
            return False
        for (begin, end), part in zip(ranges, parts, strict=True):
            self._bytes[begin:end] = np.frombuffer(part, dtype=np.uint8)
        return True
