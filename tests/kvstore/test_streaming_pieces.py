"""The pieces of a streamed entry, which thread reads them, and how fast they arrive."""

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
from torch import Tensor

from kvweave.errors import DamagedEntry
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.layers import LayerRanges, read_layer_ranges
from kvweave.kvstore.tiers import streaming
from kvweave.kvstore.tiers.streaming import PIECE_BYTES, Bandwidth, StreamingEntry, split_pieces
from kvweave.kvstore.tiers.tier import Blob, owned_copy
from support.fake_remote_tier import FakeRemoteTier
from support.streaming_samples import KINDS, WITHIN_S, another


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("there", [0, 2000, 400_000, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_the_beginning_and_the_pieces_make_up_the_entry(
    name: str, there: int, tmp_path: Path, tier: FakeRemoteTier
) -> None:
    with another(tmp_path, tier, *KINDS[name]):
        (data,) = tier.held.values()
    places = read_layer_ranges(owned_copy(data[:PIECE_BYTES]), "entry")
    assert places.bytes == len(data)
    there = max(there, places.first)
    made = split_pieces(places, there)
    parts = sorted((begin, end) for piece in made for begin, end in piece.ranges)
    edges = [(0, there), *parts]
    assert [begin for begin, _ in edges[1:]] == [end for _, end in edges[:-1]]
    assert edges[-1][1] == len(data)
    layers = [layer for piece in made for layer in piece.layers]
    assert layers == list(range(layers[0], len(places.layers)))
    assert all(end <= there for layer in places.layers[: layers[0]] for _, end in layer)
    sizes = [sum(end - begin for begin, end in piece.ranges) for piece in made]
    assert all(PIECE_BYTES <= size < 2 * PIECE_BYTES for size in sizes[:-1])


def test_the_bandwidth_is_that_of_all_concurrent_reads_together() -> None:
    now = [0.0]
    bandwidth = Bandwidth(clock=lambda: now[0])
    assert bandwidth.estimate_s(1000) == 0.0

    def later(seconds: float, size: int) -> list[Blob]:
        now[0] += seconds
        return [bytes(size)]

    for _ in range(20):
        now[0] += 100.0  # in which nothing is read
        bandwidth.measure(
            lambda: [*later(1.0, 100), *(bandwidth.measure(lambda: later(1.0, 100), 100) or [])], 200
        )
    assert bandwidth.estimate_s(150) == pytest.approx(1.0, rel=0.1)
    for _ in range(60):
        bandwidth.measure(lambda: later(0.1, 100), 100)
    assert bandwidth.estimate_s(100) == pytest.approx(0.1, rel=0.1)
    assert bandwidth.measure(lambda: None, 100) is None


def test_a_late_read_counts_before_it_ends() -> None:
    now = [0.0]
    bandwidth = Bandwidth(clock=lambda: now[0])

    def later(seconds: float, size: int) -> list[Blob]:
        now[0] += seconds
        return [bytes(size)]

    def stall() -> None:
        now[0] += 1.0
        assert bandwidth.estimate_s(10) == pytest.approx(
            0.1
        )  # within the time that the active read is expected to take
        now[0] += 100.0
        assert bandwidth.estimate_s(10) == pytest.approx(100.0)

    bandwidth.measure(lambda: later(1.0, 100), 100)
    bandwidth.measure(stall, 100)
    assert bandwidth.estimate_s(10) == pytest.approx(0.1)
    bandwidth.measure(lambda: later(101.0, 100), 100)
    assert bandwidth.estimate_s(10) > 1.0


# Which thread reads them


class InterruptedError(Exception):
    """Raised by a test during a read."""


def entry_of(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, LayerRanges, Callable[..., tuple[StreamingEntry, Tensor]]]:
    """The bytes of an entry, the ranges of its layers, and a function that begins to stream it."""
    tensors, layers, size = chance.randint(1, 3), chance.randint(1, 12), chance.randint(1, 40)
    first = 30
    content = chance.randbytes(first + tensors * layers * size)
    begins = [
        [first + (tensor * layers + layer) * size for tensor in range(tensors)] for layer in range(layers)
    ]
    where = tuple(tuple((begin, begin + size) for begin in layer) for layer in begins)
    places = LayerRanges(len(content), first, where)
    monkeypatch.setattr(streaming, "PIECE_BYTES", chance.randint(1, 3 * tensors * size))
    there = chance.randint(first, len(content) - 1)

    def begun(
        read: Callable[[Sequence[ByteRange]], Sequence[Blob] | None], on_abort: Callable[[], object]
    ) -> tuple[StreamingEntry, Tensor]:
        data = torch.zeros(len(content), dtype=torch.uint8)
        data[:there] = torch.frombuffer(bytearray(content[:there]), dtype=torch.uint8)
        return StreamingEntry(data, split_pieces(places, there), read, Bandwidth(), on_abort, "entry"), data

    return content, places, begun


@pytest.mark.parametrize("seed", range(40))
def test_every_delivered_layer_is_right_after_failures_in_between(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    content, places, begun = entry_of(chance, monkeypatch)
    loses = seed % 2 == 1
    aborted, refused = [], []

    def read(ranges: Sequence[ByteRange]) -> Sequence[Blob] | None:
        time.sleep(0.001 * chance.random())
        what = chance.random()
        if what < 0.1:
            raise InterruptedError
        if loses and what < 0.3:
            return chance.choice([None, [b""] * len(ranges)])
        return [content[begin:end] for begin, end in ranges]

    rest, data = begun(read, lambda: aborted.append(True))

    def go_through(seed: int) -> None:
        layers = list(range(len(places.layers)))
        random.Random(seed).shuffle(layers)
        while layers:
            try:
                rest.wait_for(layers[-1])
            except InterruptedError:
                continue
            except DamagedEntry:
                assert aborted
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
    assert bool(aborted) == bool(refused) == (not rest.whole)
    assert loses or (rest.whole and bytes(data.numpy()) == content)


def test_no_reader_fails_before_on_abort_has_been_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, places, begun = entry_of(random.Random(1), monkeypatch)
    aborting, go_on = threading.Event(), threading.Event()

    def on_abort() -> None:
        aborting.set()
        assert go_on.wait(WITHIN_S)

    rest, _ = begun(lambda ranges: None, on_abort)
    failed = []

    def ask() -> None:
        with pytest.raises(DamagedEntry):
            rest.wait_for(len(places.layers) - 1)
        failed.append(True)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    threads[0].start()
    assert aborting.wait(WITHIN_S)
    threads[1].start()
    threads[1].join(0.1)
    assert not failed
    go_on.set()
    for thread in threads:
        thread.join(WITHIN_S)
    assert failed == [True, True]


def test_an_interrupt_anywhere_before_a_piece_is_read_leaves_it_to_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content, places, begun = entry_of(random.Random(2), monkeypatch)
    steps, reading = 0, False

    def read(ranges: Sequence[ByteRange]) -> Sequence[Blob]:
        nonlocal reading
        reading = True
        return [content[begin:end] for begin, end in ranges]

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != streaming.__file__:
            return None
        line = linecache.getline(streaming.__file__, frame.f_lineno)
        if event == "line" and not reading and "with self." not in line:  # a lock is released there
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
