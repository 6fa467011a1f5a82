"""An entry that is used from its beginning on while the rest is read, in pieces of a few layers, in the order of the layers.

A piece is read by the first thread that needs it: a background thread that goes through all pieces, or a request that has
reached one of its layers. Other threads that need the piece wait for that piece only. Knows where layers lie, and nothing of
what is in them: they are verified when they are used (`layers.py`).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from kvweave.errors import DamagedEntry
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.layers import LayerRanges
from kvweave.kvstore.tiers.tier import Blob

DECAY = 0.9
"""Weight of earlier reads after each new one: the measured bandwidth is that of the last ten or so."""

PIECE_BYTES = 2**20
"""The least that is requested at once, so that round trips do not dominate; a smaller entry is read whole."""

RangeReader = Callable[[Sequence[ByteRange]], Sequence[Blob] | None]
"""Reads these byte ranges of an entry; None if they cannot be read."""


class StreamingEntry:
    """The layers of one entry that are still to be read; a `LayerStream`. Safe to use from several threads.

    `data` (n,) uint8 has room for the entry's bytes, with its beginning in place; the pieces `missing`, at least one, are written
    there. `on_abort` is called, in any thread, before DamagedEntry is raised because a piece cannot be read. `where` names the
    entry in errors.
    """

    def __init__(
        self,
        data: Tensor,
        missing: Sequence["Piece"],
        read: RangeReader,
        bandwidth: "Bandwidth",
        on_abort: Callable[[], object],
        where: str,
    ) -> None:
        self._bytes = data.numpy()
        self._pieces = missing
        self._piece_of = {layer: number for number, piece in enumerate(missing) for layer in piece.layers}
        self._read = read
        self._bandwidth = bandwidth
        self._on_abort = on_abort
        self._where = where
        self._states: list[Literal["missing", "reading", "read"]] = ["missing"] * len(missing)
        self._aborted = False
        self._changed = threading.Condition()

    @property
    def whole(self) -> bool:
        return all(state == "read" for state in self._states)

    @property
    def layer_wait_s(self) -> float:
        """Estimated seconds to read a layer over this link; 0 once everything has been read."""
        layers = self._pieces[-1].layers.stop
        return 0.0 if self.whole else self._bandwidth.estimate_s(len(self._bytes) / layers)

    def wait_for(self, layer: int) -> None:
        """Read a layer's piece, or wait for the thread that reads it; raise DamagedEntry if it cannot be read."""
        number = self._piece_of.get(layer)
        if number is not None:
            self._ensure(number)

    def advance(self) -> bool:
        """Read the next missing piece; return whether everything has been read. Raise DamagedEntry as `wait_for`."""
        for number, state in enumerate(self._states):
            if state != "read":
                self._ensure(number)
                break
        return self.whole

    def _ensure(self, number: int) -> None:
        while self._states[number] != "read":
            mine = done = False
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._aborted or self._states[number] != "reading")
                    if self._states[number] == "missing" and not self._aborted:
                        mine = True
                        self._states[number] = "reading"
                if mine:
                    done = self._fill(self._pieces[number].ranges)
            finally:  # after an interrupt of this thread, others may still want the piece
                if mine:
                    with self._changed:
                        self._states[number] = "read" if done else "missing"
                        self._changed.notify_all()
            if self._aborted and self._states[number] != "read":
                raise DamagedEntry(f"the rest of {self._where} cannot be had any more")

    def _fill(self, ranges: Sequence[ByteRange]) -> bool:
        """Read a piece into its place; return False if it cannot be read, after which no other piece is."""
        parts = self._read(ranges)
        if parts is None or list(map(len, parts)) != [end - begin for begin, end in ranges]:
            self._on_abort()  # first: a request that fails and retries must not get this stream again
            self._aborted = True
            return False
        for (begin, end), part in zip(ranges, parts, strict=True):
            self._bytes[begin:end] = np.frombuffer(part, dtype=np.uint8)
        return True


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers that are read together, and the byte ranges of the entry that they need, in ascending order."""

    layers: range
    ranges: tuple[ByteRange, ...]


def split_pieces(entry: LayerRanges, read_bytes: int) -> list[Piece]:
    """Return what is to be read when the first `read_bytes` of an entry are; layers within these are in no piece."""
    made, size = list[Piece](), 0
    first = sum(max(end for _, end in layer) <= read_bytes for layer in entry.layers)
    for index in range(first, len(entry.layers)):
        size += sum(max(0, end - max(begin, read_bytes)) for begin, end in entry.layers[index])
        if size >= PIECE_BYTES or index == len(entry.layers) - 1:
            made.append(_piece(entry, range(first, index + 1), read_bytes))
            first, size = index + 1, 0
    return made


def _piece(entry: LayerRanges, layers: range, read_bytes: int) -> Piece:
    ranges = list[ByteRange]()
    for (begin, _), (_, end) in zip(entry.layers[layers[0]], entry.layers[layers[-1]], strict=True):
        begin = max(begin, read_bytes)
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        elif begin < end:
            ranges.append((begin, end))
    return Piece(layers, tuple(ranges))


class Bandwidth:
    """The measured bandwidth of all concurrent reads over one link together. Safe to use from several threads.

    `clock` returns seconds from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._active_reads = 0
        self._requested_bytes = 0  # at most, by all active reads
        self._since_s = 0.0  # since then a read is active, and nothing has arrived
        self._seconds = self._bytes = 0.0

    def measure(self, read: Callable[[], Sequence[Blob] | None], max_bytes: int) -> Sequence[Blob] | None:
        """Return the result of `read`, at most `max_bytes`, and count its bytes and its time."""
        with self._guard:
            if not self._active_reads:
                self._since_s = self._clock()
            self._active_reads += 1
            self._requested_bytes += max_bytes
        size = 0
        try:
            parts = read()
            size = sum(map(len, parts or ()))
        finally:
            with self._guard:
                self._active_reads -= 1
                self._requested_bytes -= max_bytes
                if size:
                    self._record(size)
        return parts

    def estimate_s(self, size_bytes: float) -> float:
        """Return how long this many bytes will take; at least as long as the active reads are late."""
        with self._guard:
            seconds_per_byte = self._seconds / self._bytes if self._bytes else 0.0
            waited_s = self._clock() - self._since_s if self._active_reads else 0.0
            return max(size_bytes * seconds_per_byte, waited_s - self._requested_bytes * seconds_per_byte)

    def _record(self, size_bytes: int) -> None:
        now_s = self._clock()
        self._seconds = DECAY * self._seconds + now_s - self._since_s
        self._bytes = DECAY * self._bytes + size_bytes
        self._since_s = now_s
