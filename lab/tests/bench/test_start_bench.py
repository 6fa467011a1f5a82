"""`kvweave bench start`: parts of a command's start, each charged once."""

import json
import sys

import pytest

from kvweave.errors import KvweaveError
from kvweave_lab.bench import start, start_trace
from kvweave_lab.bench.serving.processes import ServerProcess, free_port
from kvweave_lab.bench.start_trace import CONTROL, LOADER, OURS, PASSES, PROBE, Clock


@pytest.fixture
def others(tmp_path):
    path = tmp_path / "modules.json"
    path.write_text(json.dumps({CONTROL: ["json", "typer"], LOADER: []}))
    return path


def test_parts_of_a_command_are_its_processor_time(tmp_path, others):
    run = start.traced(["--help"], tmp_path, others)
    assert {OURS, "import kvweave", CONTROL} <= run.parts.keys()
    assert sum(run.parts.values()) == pytest.approx(run.cpu_s, abs=0.25)
    assert run.own_s == pytest.approx(sum(run.parts.values()) - run.parts[CONTROL])
    assert run.parts[CONTROL] > 0  # the modules that it loads are not charged to the command


BUSY_SERVER = """
import http.server, signal, sys, time

def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def end(*signal):
    compute(0.3)
    sys.exit()

class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, end)
compute(0.3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def test_a_server_is_timed_until_it_is_ready(tmp_path, monkeypatch):
    """One that computes before it is ready and at its end; `test_real_servers` starts those of `kvweave serve`."""

    def busy_server(name, folder, **given):
        assert given == {"model": None, "flags": ["--no-idle-work"], "home": tmp_path / "home"}
        port = free_port()
        return ServerProcess(name, [sys.executable, "-c", BUSY_SERVER, str(port)], port, folder)

    monkeypatch.setattr(start, "kvweave_server", busy_server)
    run = start.served(tmp_path, tmp_path / "home", None)
    assert run.wall_s > 0.3
    assert run.cpu_s > 0.6  # that of its end too
    assert run.parts == {}


def test_a_command_that_fails_is_named_with_what_it_printed(tmp_path, others):
    with pytest.raises(KvweaveError, match=r"ask question` failed: .*no knowledge base"):
        start.traced(["ask", "question"], tmp_path, others)


def test_the_innermost_part_is_charged(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(start_trace.time, "process_time", lambda: now[0])
    clock = Clock()
    with clock.part("outer"):
        now[0] += 1
        with clock.part("inner"):
            now[0] += 2
        now[0] += 4
    now[0] += 8
    clock.charge()
    assert dict(clock.seconds) == {"outer": 5, "inner": 2, OURS: 8}


def test_passes_count_once_and_the_probe_s_do_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(start_trace.time, "process_time", lambda: now[0])

    class Model:
        def run(self, depth):
            now[0] += 1
            if depth:
                self.run(depth - 1)

    clock, module = Clock(), type("module", (), {"Model": Model})
    start_trace.wrap(module, "Model.run", clock, PASSES)
    Model().run(2)
    with clock.part(PROBE):
        Model().run(0)
    clock.charge()
    assert (clock.seconds[PASSES], clock.seconds[PROBE]) == (3, 1)
