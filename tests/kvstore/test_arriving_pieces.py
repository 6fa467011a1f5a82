"""What an entry comes in: its pieces, who reads them, and how fast they come."""

import linecache
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from arriving_samples import KINDS, WITHIN_S, another
from memory_tier import MemoryTier
from torch import Tensor

from kvweave.errors import DamagedEntry
from kvweave.kvstore.format import LayerPlaces, layer_places
from kvweave.kvstore.tiers import streaming as arriving
from kvweave.kvstore.tiers.streaming import PIECE_BYTES, Bandwidth, StreamingEntry, pieces
from kvweave.kvstore.tiers.tier import Blob, Range, owned_copy


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("there", [0, 2000, 400_000, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_what_is_there_and_the_pieces_make_up_the_entry(
    name: str, there: int, tmp_path: Path, tier: MemoryTier
) -> None:
    with another(tmp_path, tier, *KINDS[name]):
        (data,) = tier.held.values()
    places = layer_places(owned_copy(data[:PIECE_BYTES]), "entry")
    assert places.bytes == len(data)
    there = max(there, places.first)
    made = pieces(places, there)
    parts = sorted((begin, end) for piece in made for begin, end in piece.ranges)
    edges = [(0, there), *parts]
    assert [begin for begin, _ in edges[1:]] == [end for _, end in edges[:-1]]
    assert edges[-1][1] == len(data)
    layers = [layer for piece in made for layer in piece.layers]
    assert layers == list(range(layers[0], len(places.layers)))
    assert all(end <= there for layer in places.layers[: layers[0]] for _, end in layer)
    sizes = [sum(end - begin for begin, end in piece.ranges) for piece in made]
    assert all(PIECE_BYTES <= size < 2 * PIECE_BYTES for size in sizes[:-1])


def test_the_pace_is_that_of_all_reads_that_share_the_link() -> None:
    now = [0.0]
    pace = Bandwidth(clock=lambda: now[0])
    assert pace.takes_s(1000) == 0.0

    def later(seconds: float, size: int) -> list[Blob]:
        now[0] += seconds
        return [bytes(size)]

    for _ in range(20):
        now[0] += 100.0  # in which nothing is asked for
        pace.timed(lambda: [*later(1.0, 100), *(pace.timed(lambda: later(1.0, 100), 100) or [])], 200)
    assert pace.takes_s(150) == pytest.approx(1.0, rel=0.1)
    for _ in range(60):
        pace.timed(lambda: later(0.1, 100), 100)
    assert pace.takes_s(100) == pytest.approx(0.1, rel=0.1)
    assert pace.timed(lambda: None, 100) is None


def test_what_is_late_counts_before_it_comes() -> None:
    now = [0.0]
    pace = Bandwidth(clock=lambda: now[0])

    def later(seconds: float, size: int) -> list[Blob]:
        now[0] += seconds
        return [bytes(size)]

    def stall() -> None:
        now[0] += 1.0
        assert pace.takes_s(10) == pytest.approx(0.1)  # as long as this is expected to take
        now[0] += 100.0
        assert pace.takes_s(10) == pytest.approx(100.0)

    pace.timed(lambda: later(1.0, 100), 100)
    pace.timed(stall, 100)
    assert pace.takes_s(10) == pytest.approx(0.1)
    pace.timed(lambda: later(101.0, 100), 100)
    assert pace.takes_s(10) > 1.0


# Who reads them


class InterruptedError(Exception):
    """What a test raises in the middle of a read."""


def entry_of(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, LayerPlaces, Callable[..., tuple[StreamingEntry, Tensor]]]:
    """The bytes of an entry, where its layers lie, and what makes one of which only the beginning is there."""
    tensors, layers, size = chance.randint(1, 3), chance.randint(1, 12), chance.randint(1, 40)
    first = 30
    content = chance.randbytes(first + tensors * layers * size)
    begins = [
        [first + (tensor * layers + layer) * size for tensor in range(tensors)] for layer in range(layers)
    ]
    where = tuple(tuple((begin, begin + size) for begin in layer) for layer in begins)
    places = LayerPlaces(len(content), first, where)
    monkeypatch.setattr(arriving, "PIECE_BYTES", chance.randint(1, 3 * tensors * size))
    there = chance.randint(first, len(content) - 1)

    def begun(
        read: Callable[[Sequence[Range]], Sequence[Blob] | None], broken_off: Callable[[], object]
    ) -> tuple[StreamingEntry, Tensor]:
        data = torch.zeros(len(content), dtype=torch.uint8)
        data[:there] = torch.frombuffer(bytearray(content[:there]), dtype=torch.uint8)
        return StreamingEntry(data, pieces(places, there), read, Bandwidth(), broken_off, "entry"), data

    return content, places, begun


@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_in_between_each_layer_that_is_given_is_the_one_that_was_stored(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    content, places, begun = entry_of(chance, monkeypatch)
    loses = seed % 2 == 1
    told, refused = [], []

    def read(ranges: Sequence[Range]) -> Sequence[Blob] | None:
        time.sleep(0.001 * chance.random())
        what = chance.random()
        if what < 0.1:
            raise InterruptedError
        if loses and what < 0.3:
            return chance.choice([None, [b""] * len(ranges)])
        return [content[begin:end] for begin, end in ranges]

    rest, data = begun(read, lambda: told.append(True))

    def go_through(seed: int) -> None:
        layers = list(range(len(places.layers)))
        random.Random(seed).shuffle(layers)
        while layers:
            try:
                rest.wait_for(layers[-1])
            except InterruptedError:
                continue
            except DamagedEntry:
                assert told
                refused.append(True)
            else:
                for begin, end in places.layers[layers[-1]]:
                    assert bytes(data[begin:end].numpy()) == content[begin:end]
            layers.pop()

    def advance() -> None:
        done = False
        while not done:
            with suppress(InterruptedError):
                try:
                    done = rest.advance()
                except DamagedEntry:
                    return

    with ThreadPoolExecutor(5) as pool:
        for done in [pool.submit(advance), *(pool.submit(go_through, seed) for seed in range(4))]:
            done.result(WITHIN_S)
    assert bool(told) == bool(refused) == (not rest.whole)
    assert loses or (rest.whole and bytes(data.numpy()) == content)


def test_nobody_is_told_that_a_piece_is_lost_before_it_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _, places, begun = entry_of(random.Random(1), monkeypatch)
    breaking_off, go_on = threading.Event(), threading.Event()

    def broken_off() -> None:
        breaking_off.set()
        assert go_on.wait(WITHIN_S)

    rest, _ = begun(lambda ranges: None, broken_off)
    told = []

    def ask() -> None:
        with pytest.raises(DamagedEntry):
            rest.wait_for(len(places.layers) - 1)
        told.append(True)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert breaking_off.wait(WITHIN_S)
    threads[1].start()
    threads[1].join(0.1)
    assert not told
    go_on.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert told == [True, True]


def test_an_interrupt_anywhere_before_a_piece_is_read_leaves_it_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, places, begun = entry_of(random.Random(2), monkeypatch)
    steps, reading = 0, False

    def read(ranges: Sequence[Range]) -> Sequence[Blob]:
        nonlocal reading
        reading = True
        return [content[begin:end] for begin, end in ranges]

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != arriving.__file__:
            return None
        line = linecache.getline(arriving.__file__, frame.f_lineno)
        if event == "line" and not reading and "with self." not in line:  # a lock is let go of there
            steps -= 1
            if steps == 0:
                raise KeyboardInterrupt
        return interrupt

    interrupts = 0
    while not reading:
        rest, _ = begun(read, lambda: None)
        steps = interrupts + 1
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with suppress(KeyboardInterrupt):
                rest.wait_for(len(places.layers) - 1)
        finally:
            sys.settrace(before)
        if reading:
            break
        interrupts += 1
        other = threading.Thread(target=rest.wait_for, args=[len(places.layers) - 1], daemon=True)
        other.start()
        other.join(10.0)
        assert not other.is_alive(), f"after an interrupt at step {interrupts}"
        reading = False
    assert interrupts > 5
