import threading
import time
from collections.abc import Iterator

import pytest

from kvweave.kvstore.tiers.leases import Lease, Pins
from kvweave.kvstore.tiers.loading import AbandonedError, IsWanted, Loader
from support.store_samples import eventually

WITHIN_S = 60.0


@pytest.fixture
def loader() -> Iterator[Loader[str]]:
    made: Loader[str] = Loader(threads=2)
    yield made
    made.close()


class Gate:
    """Work that waits until the test opens the gate, and counts how often it was begun."""

    def __init__(self, result: str = "done") -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.runs = 0
        self.result = result

    def __call__(self, wanted: IsWanted) -> str:
        self.runs += 1
        self.begun.set()
        assert self.open.wait(WITHIN_S)
        return self.result


def test_one_load_serves_all_callers(loader: Loader[str]) -> None:
    gate = Gate()
    first, second = loader.start(("disk", "a"), gate), loader.start(("disk", "a"), gate)
    assert first is second
    assert gate.begun.wait(WITHIN_S)
    gate.open.set()
    assert loader.wait([first]) == loader.wait([second]) == ["done"]
    assert gate.runs == 1
    assert loader.pending == 0
    assert loader.wait([loader.start(("disk", "a"), lambda _: "again")]) == ["again"]


def test_a_thread_runs_the_load_it_waits_for_if_it_has_not_begun(loader: Loader[str]) -> None:
    """All threads are busy with another request's slow loads: this one does not wait for them."""
    slow = [Gate() for _ in range(6)]
    others = [loader.start(("shared", number), gate) for number, gate in enumerate(slow)]
    assert slow[0].begun.wait(WITHIN_S)
    assert slow[1].begun.wait(WITHIN_S)
    mine = loader.start(("shared", "mine"), lambda _: threading.current_thread().name)
    assert loader.wait([mine]) == [threading.current_thread().name]
    for gate in slow:
        gate.open.set()
    assert loader.wait(others) == ["done"] * 6


def test_an_inline_load_is_not_begun_by_background_threads(loader: Loader[str]) -> None:
    load = loader.start(("disk", "a"), lambda _: threading.current_thread().name, inline=True)
    time.sleep(0.05)
    assert load.state == "queued"
    assert loader.wait([load]) == [threading.current_thread().name]


def test_unwanted_loads_are_not_begun_and_running_ones_can_ask(loader: Loader[str]) -> None:
    gates = [Gate(), Gate()]
    running = [loader.start(("shared", number), gate) for number, gate in enumerate(gates)]
    assert all(gate.begun.wait(WITHIN_S) for gate in gates)
    never = Gate()
    queued = loader.start(("shared", "queued"), never)
    loader.cancel([queued])
    abandoned: list[bool] = []
    seen = threading.Event()

    def attentive(wanted: IsWanted) -> str:
        seen.set()
        while wanted():
            time.sleep(0.001)
        abandoned.append(True)
        raise AbandonedError

    gates[0].open.set()
    loader.wait(running[:1])
    last = loader.start(("shared", "attentive"), attentive)
    assert seen.wait(WITHIN_S)
    loader.cancel([last])
    assert eventually(lambda: abandoned == [True])
    gates[1].open.set()
    loader.wait(running[1:])
    assert never.runs == 0
    assert eventually(lambda: loader.pending == 0)


def test_a_load_cancelled_by_one_caller_continues_for_the_others(loader: Loader[str]) -> None:
    gate = Gate()
    mine, yours = loader.start(("shared", "a"), gate), loader.start(("shared", "a"), gate)
    assert gate.begun.wait(WITHIN_S)
    loader.cancel([mine])
    gate.open.set()
    assert loader.wait([yours]) == ["done"]


def test_an_abandoned_load_is_started_again_for_a_later_caller(loader: Loader[str]) -> None:
    noticed, go_on = threading.Event(), threading.Event()
    runs: list[bool] = []

    def work(wanted: IsWanted) -> str:
        runs.append(True)
        if len(runs) > 1:
            return "done"
        while wanted():
            time.sleep(0.001)
        noticed.set()
        assert go_on.wait(WITHIN_S)
        raise AbandonedError

    first = loader.start(("shared", "a"), work)
    assert eventually(lambda: runs == [True])
    loader.cancel([first])
    assert noticed.wait(WITHIN_S)
    second = loader.start(("shared", "a"), work)
    go_on.set()
    assert loader.wait([second]) == ["done"]


def test_the_error_of_a_load_is_raised_in_every_waiting_caller_and_forgotten(loader: Loader[str]) -> None:
    def fail(_: IsWanted) -> str:
        raise OSError("broken")

    loads = [loader.start(("disk", "a"), fail) for _ in range(2)]
    for load in loads:
        with pytest.raises(OSError, match="broken"):
            loader.wait([load])
    assert loader.pending == 0
    assert loader.wait([loader.start(("disk", "a"), lambda _: "mended")]) == ["mended"]


def test_an_interrupt_of_the_loading_thread_leaves_the_load_to_other_threads(loader: Loader[str]) -> None:
    interrupted: list[bool] = []

    def work(_: IsWanted) -> str:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return "done"

    mine = loader.start(("disk", "a"), work, inline=True)
    yours = loader.start(("disk", "a"), work, inline=True)
    with pytest.raises(KeyboardInterrupt):
        loader.wait([mine])
    assert loader.wait([yours]) == ["done"]


def test_closing_waits_for_background_tasks_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    loader: Loader[str] = Loader(threads=1)
    done: list[int] = []
    for number in range(5):
        loader.run_later(lambda number=number: done.append(number))  # type: ignore[misc]
    loader.run_later(lambda: done.append(1 // 0))
    loader.close()
    assert done == list(range(5))
    assert "ZeroDivisionError" in caplog.text
    loader.run_later(lambda: done.append(9))
    loader.close()
    assert done == list(range(5))
    assert loader.wait([loader.start(("disk", "a"), lambda _: "by the caller")]) == ["by the caller"]


def test_a_lease_releases_everything_on_every_path() -> None:
    pins = Pins()
    cancelled: list[str] = []

    def fail() -> None:
        with Lease(pins) as inner:
            inner.pin(["b", "c"])
            inner.on_close(lambda: cancelled.append("inner"))
            assert pins.in_use() == {"a", "b", "c"}
            raise ZeroDivisionError

    with Lease(pins) as outer:
        outer.pin(["a", "b"])
        with pytest.raises(ZeroDivisionError):
            fail()
        assert pins.in_use() == {"a", "b"}
        assert cancelled == ["inner"]
        outer.close()
        assert pins.in_use() == frozenset()
    assert pins.in_use() == frozenset()
