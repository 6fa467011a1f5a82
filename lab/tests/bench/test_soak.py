"""`kvweave bench soak`: what was acknowledged, memory over time, and damage that its checks must find."""

import asyncio
import time

import pytest

from kvweave_lab.bench.serving.processes import process_memory
from kvweave_lab.bench.serving.soak import counted_requests, memory_trend
from kvweave_lab.bench.serving.soak_ledger import Ledger
from kvweave_lab.bench.serving.soak_users import SoakState, User
from kvweave_lab.bench.serving.stored import verify_stored
from processes import Program

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


def samples(sizes, every_s=1.0):
    return [(every_s * number, size) for number, size in enumerate(sizes)]


def test_memory_is_judged_after_the_warm_up():
    rising, steady = range(100, 200), [200 * MB] * 100
    trend = memory_trend(samples([*(size * MB for size in rising), *steady]), 100)
    assert trend.flat
    assert trend.first_bytes == trend.last_bytes == 200 * MB
    assert abs(trend.slope_bytes_per_minute) < 1
    assert not memory_trend(samples([*(size * MB for size in rising), *steady]), 20).flat


def test_a_leak_shows_as_a_slope():
    trend = memory_trend(samples([100 * MB + second * MB // 2 for second in range(200)]), 20)
    assert not trend.flat
    assert trend.slope_bytes_per_minute == pytest.approx(30 * MB, rel=0.01)
    assert memory_trend(samples([1] * 20), 15) is None  # too few to tell


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


@pytest.mark.parametrize(
    ("sent", "now", "outcome"),
    [
        ("up", "up", "failed"),
        ("up", "down", "interrupted"),
        ("up", "stopping", "failed"),  # sent before SIGTERM, so it must be answered
        ("stopping", "stopping", "refused"),
    ],
)
def test_a_broken_connection_is_lost_unless_the_server_was_killed_or_about_to_end(sent, now, outcome):
    async def broken():
        state.mode = now
        raise ConnectionResetError("by the server")

    state = SoakState("http://127.0.0.1:9", "model", ("text",), 4, mode=sent)
    assert asyncio.run(User(0, state, None, 0)._outcome("chat", broken)) == outcome
    assert state.counts == {("chat", outcome): 1}
    assert bool(state.failures) == (outcome == "failed")
