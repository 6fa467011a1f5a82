"""`kvweave bench soak`: what was acknowledged, memory over time, and damage that its checks must find."""

import asyncio
import time

import pytest

from kvweave_lab.bench.serving.client import BrokenStream, events
from kvweave_lab.bench.serving.processes import ProcessMemory, process_memory
from kvweave_lab.bench.serving.soak import counted_requests, soak_memory
from kvweave_lab.bench.serving.soak_ledger import Ledger
from kvweave_lab.bench.serving.soak_users import SoakState, User
from kvweave_lab.bench.serving.stored import verify_stored
from support.processes import Program

MB = 2**20


def test_documents_are_lost_or_back_only_after_an_acknowledgement():
    ledger = Ledger()
    for name in ("there", "gone", "deleted", "back", "open"):
        ledger.changing("a", name)
    for name in ("there", "gone", "deleted", "back"):
        ledger.added("a", name)
    for name in ("deleted", "back"):
        ledger.changing("a", name)
        ledger.deleted("a", name)
    ledger.changing("a", "there")  # its deletion was sent and not acknowledged: both are right
    assert ledger.bases == ["a"]
    found = ledger.compare({"a": ["uploads/back", "new"]})
    assert (found.lost, found.back) == (("a/gone",), ("a/back",))
    assert ledger.compare({}).lost == ("a/gone",)


def samples(sizes, anonymous=None, every_s=1.0):
    memory = zip(sizes, anonymous or sizes, strict=True)
    return [(every_s * number, ProcessMemory(*one)) for number, one in enumerate(memory)]


def test_memory_is_judged_after_the_warm_up():
    rising, steady = range(100, 200), [200 * MB] * 100
    trend = soak_memory(samples([*(size * MB for size in rising), *steady]), 100).resident
    assert trend.flat
    assert trend.first_bytes == trend.last_bytes == 200 * MB
    assert abs(trend.slope_bytes_per_minute) < 1
    assert not soak_memory(samples([*(size * MB for size in rising), *steady]), 20).resident.flat


def test_a_leak_shows_as_a_slope():
    trend = soak_memory(samples([100 * MB + second * MB // 2 for second in range(200)]), 20).anonymous
    assert not trend.flat
    assert trend.slope_bytes_per_minute == pytest.approx(30 * MB, rel=0.01)
    assert soak_memory(samples([1] * 20), 15) is None  # too few to tell


def test_mapped_files_are_told_from_memory_that_no_file_backs():
    files = [(100 + second) * MB for second in range(100)]
    found = soak_memory(samples(files, [50 * MB] * 100), 0)
    assert (found.resident.flat, found.anonymous.flat) == (False, True)
    assert found.resident.growth == pytest.approx(75 / 112, abs=0.01)  # of the quarters' medians
    assert found.anonymous.growth == 0
    assert found.resident.points[0] == (9.0, 104.5 * MB)
    assert [at for at, _ in found.anonymous.points] == [9.0 + 10 * part for part in range(10)]


def test_running_and_waiting_requests_are_read_from_metrics():
    text = "# TYPE kvweave:num_requests_running gauge\nkvweave:num_requests_running 2.0\n"
    text += 'kvweave:num_requests_waiting{model="a"} 3.0\nkvweave:prompt_tokens_total 9.0\n'
    assert counted_requests(text) == 5


def test_a_damaged_store_of_requests_and_a_damaged_database_are_found(tmp_path):
    from kvweave.kvstore.chunk_store import ChunkStore
    from kvweave.recipes.methods import recipe_named
    from kvweave.recipes.offline import prepare
    from kvweave.testing import tiny_adapter

    with ChunkStore(tmp_path / "requests", namespace="requests") as store:
        prepare(tiny_adapter(), store, ["the inn on the road"], recipe=recipe_named("reuse"))
    whole = verify_stored(tmp_path)
    assert whole.checked >= 1
    assert whole.problems == ()
    entry = next((tmp_path / "requests").glob("??/*.safetensors"))
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes(content)
    (tmp_path / "other.sqlite").write_bytes(b"no database " * 100)
    damage, other = sorted(verify_stored(tmp_path).problems, key=lambda text: "other" in text)
    assert "store of requests" in damage
    assert "other.sqlite: file is not a database" in other


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    """Even one that is paused, and when the process is killed."""
    code = (
        "import os, sys, pathlib, signal\n"
        "from kvweave_lab.bench.serving.processes import ServerProcess\n"
        "server = ServerProcess('idle', [sys.executable, '-c', 'import time; time.sleep(600)'], 9, pathlib.Path('.'))\n"
        "server._wait_until_ready = lambda: None\n"
        "server.start(); server.pause(); print(server.pid, flush=True); signal.pause()"
    )
    with Program(["-c", code], cwd=tmp_path) as program:
        pid = int(program.stdout.readline())
        program.kill()
        program.wait(60)
    until = time.monotonic() + 30
    while process_memory(pid).resident:
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.05)


RESET, REFUSED = ConnectionResetError("by the server"), ConnectionRefusedError()
CANCELLED = BrokenStream("given up", "cancelled")


@pytest.mark.parametrize(
    ("error", "sent", "now", "outcome"),
    [
        (RESET, "up", "up", "failed"),
        (RESET, "up", "down", "interrupted"),
        (RESET, "up", "stopping", "failed"),  # its client cannot tell whether it was done
        (RESET, "stopping", "stopping", "stopped"),
        (REFUSED, "up", "up", "failed"),
        (REFUSED, "up", "stopping", "stopped"),  # the server has never had it
        (CANCELLED, "up", "stopping", "stopped"),
        (CANCELLED, "up", "up", "failed"),
        (CANCELLED, "up", "down", "interrupted"),
        (BrokenStream("another error", "server_error"), "up", "stopping", "failed"),
        (BrokenStream("no end"), "up", "stopping", "failed"),
        (None, "up", "up", "refused"),
        (None, "up", "stopping", "stopped"),
    ],
)
def test_a_request_is_lost_if_its_client_cannot_tell_what_became_of_it(error, sent, now, outcome):
    async def broken():
        state.mode = now
        if error is None:
            return "refused"
        raise error

    state = SoakState("http://127.0.0.1:9", "model", ("text",), 4, mode=sent)
    assert asyncio.run(User(0, state, None, 0).outcome("chat", broken)) == outcome
    assert state.counts == {("chat", outcome): 1}
    assert bool(state.failures) == (outcome == "failed")
    assert all(f"sent while {sent}, broken while {now}" in failure for failure in state.failures)


def test_the_error_of_a_stream_keeps_its_code():
    async def read():
        async def lines():
            yield 'data: {"error": {"message": "given up", "code": "cancelled"}}'

        return [event async for event in events(lines())]

    with pytest.raises(BrokenStream, match="given up") as raised:
        asyncio.run(read())
    assert raised.value.code == "cancelled"
