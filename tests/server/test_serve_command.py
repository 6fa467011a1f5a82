"""`kvweave serve` in a process of its own: readiness, one server for each home, signals, metrics and logs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

import kvweave
from kvweave.cli.app import app
from support.processes import Program, run_program

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "stream": True}


class Served:
    """A server; one that `imports` everything itself takes long enough to load for a test to see that it loads."""

    def __init__(self, home, *words, imports=False):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.home = home
        words = ["-m", "kvweave", "serve", "--home", str(home), "--port", str(port), "--no-idle-work", *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVWEAVE_")}
        if imports:
            pipe = subprocess.PIPE
            command = [sys.executable, *words]
            self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        else:
            self.process = Program(words, environment)

    def status(self):
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=30).status_code
        except httpx.TransportError:
            return None

    def wait(self, status, timeout_s=120):
        until_s = time.monotonic() + timeout_s
        while (found := self.status()) != status:
            assert time.monotonic() < until_s, found
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def test_it_opens_the_port_before_the_model_is_loaded_and_ends_without_losing_a_request(home):
    with Served(home, imports=True) as served:
        served.wait(503)
        served.wait(200)
        record = json.loads((home / "server.json").read_text())
        assert record["url"] == served.url
        assert record["pid"] == served.process.pid

        second = run_program(["-m", "kvweave", "serve", "--home", str(home), "--port", "0"])
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert served.url in line
        assert "runs already" in line

        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=BODY, timeout=60, trust_env=False
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        out, errors = served.process.communicate(timeout=30)
        assert served.process.returncode == 0
        assert out.splitlines() == [f"kvweave listens on {served.url}"]
        logged = [json.loads(line) for line in errors.splitlines()]
        (asked,) = [line for line in logged if line.get("path") == "/v1/chat/completions"]
        assert asked["status"] == 200
        assert asked["request_id"].startswith("req_")
        assert not (home / "server.json").exists()


def test_a_second_signal_cancels_what_runs(home):
    with Served(home) as served:
        served.wait(200)
        body = {**BODY, "max_tokens": 400, "messages": [{"role": "user", "content": "hello " * 400}]}
        with httpx.stream(
            "POST", f"{served.url}/v1/chat/completions", json=body, timeout=60, trust_env=False
        ) as reply:
            next(reply.iter_lines())
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(30)
        assert served.process.returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--model", "/nonexistent/model"], "nonexistent"),
        (["--tenants", "/nonexistent.toml"], "nonexistent.toml"),
        (["--ping-s", "0"], "ping_s"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(home, words, said):
    with Served(home, *words) as served:
        served.process.wait(120)
        errors = [line for line in served.process.stderr.read().splitlines() if not line.startswith("{")]
        assert served.process.returncode == 1
        assert len(errors) == 1
        assert said in errors[0]


def test_a_port_that_is_taken_is_said_in_one_line(home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", "--home", str(home), "--port", str(taken.getsockname()[1])]
        found = run_program(["-m", "kvweave", *words])
    assert found.returncode == 1
    assert "port" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_help_and_listing_need_no_server_library(tmp_path):
    code = "import sys; from kvweave.cli.app import app; from typer.testing import CliRunner; CliRunner().invoke(app, {words!r}); print([m for m in ('fastapi', 'uvicorn', 'starlette', 'prometheus_client', 'torch') if m in sys.modules])"
    for words in (["--help"], ["ls", "--home", str(tmp_path / "home")], ["serve", "--help"]):
        found = subprocess.run(
            [sys.executable, "-c", code.format(words=words)], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == "[]", words


def test_the_port_is_open_before_the_engine_is_imported():
    code = "import sys, kvweave.server.process.lifecycle; print([m for m in ('fastapi', 'torch', 'transformers', 'lancedb') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_knowledge_base_names_the_models(home):
    import kvweave
    from kvweave.config import read_config
    from kvweave.samples import DOCUMENTS
    from kvweave.state.knowledge_base_state import with_recorded_models

    with kvweave.open("notes", home=home, chunk_tokens=48, dtype="float32", recipe="full") as base:
        base.add(DOCUMENTS / "badges.txt")
        model = base.model.fingerprint
    found = with_recorded_models(read_config(home, {}), "notes").model
    assert (found.model, found.dtype, found.weights) == (model.name, "float32", "full")
    assert with_recorded_models(read_config(home, {}, model="other"), "notes").model.model == "other"
    assert with_recorded_models(read_config(home, {}), "nothing").model.model is None


@pytest.mark.parametrize(
    ("name", "said"), [("typo", "'typo' (there are notes)"), ("notes", ""), ("default", "")]
)
def test_a_knowledge_base_that_is_not_there_is_said(home, monkeypatch, name, said):
    served = []
    monkeypatch.setattr("kvweave.server.process.lifecycle.serve", lambda *given: served.append(given))
    monkeypatch.setenv("KVWEAVE_HOME", str(home))
    kvweave.open("notes", home=home).close()
    found = CliRunner().invoke(app, ["serve", "--kb", name])
    assert (found.exit_code, len(served)) == (0, 1)
    assert said in found.stderr
    assert bool(found.stderr) is bool(said)


def test_settings_come_from_flags_the_environment_and_the_file(home, monkeypatch):
    from kvweave.config import read_config

    home.mkdir()
    (home / "config.toml").write_text('port = 1\nping_s = 3\nmax_queue = 7\napi_key = "from-the-file"\n')
    environment = {"KVWEAVE_PORT": "2", "KVWEAVE_PING_S": "4", "KVWEAVE_IDLE_WORK": "no"}
    found = read_config(home, environment, port=3).server
    assert (found.port, found.ping_s, found.max_queue, found.idle_work, found.api_key) == (
        3,
        4.0,
        7,
        False,
        "from-the-file",
    )
