"""A running server is found by its home folder, and never believed once it is gone."""

import json
import subprocess
import sys
import time

import pytest

from kvweave.errors import InvalidRequest
from kvweave.server.process.discovery import find_server, record, sole_server

HOLD = """
import sys, time
from pathlib import Path
from kvweave.server.process.discovery import record, sole_server
home = Path(sys.argv[1])
with sole_server(home):
    record(home, "http://127.0.0.1:1")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_there_is_none_in_a_new_home_and_looking_creates_nothing(tmp_path):
    assert find_server(tmp_path / "home") is None
    assert list(tmp_path.iterdir()) == []


def test_a_server_is_found_while_it_runs(tmp_path):
    home = tmp_path / "home"
    with sole_server(home):
        assert find_server(home) is None  # not recorded yet
        record(home, "http://127.0.0.1:8420")
        found = find_server(home)
        assert found is not None
        assert found.url == "http://127.0.0.1:8420"
        assert abs(found.started_s - time.time()) < 60
    assert find_server(home) is None
    assert not (home / "server.json").exists()


def test_a_home_has_one_server_and_looking_for_it_does_not_stop_another_from_starting(tmp_path):
    with sole_server(tmp_path):
        record(tmp_path, "http://127.0.0.1:8420")
        message = r"runs already at http://127\.0\.0\.1:8420 \(process \d+\)"
        with pytest.raises(InvalidRequest, match=message), sole_server(tmp_path):
            pass
        assert find_server(tmp_path) is not None
    for _ in range(50):
        assert find_server(tmp_path) is None
        with sole_server(tmp_path):
            pass


def test_a_killed_server_is_not_found_though_its_file_is_there(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    assert find_server(tmp_path).pid == process.pid
    process.kill()
    process.communicate()
    assert (tmp_path / "server.json").exists()
    assert find_server(tmp_path) is None
    with sole_server(tmp_path):
        assert find_server(tmp_path) is None  # nor is the killed one taken for this one


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"url": "http://x"}', json.dumps({"url": 1, "pid": "x"}).encode()]
)
def test_an_unreadable_file_is_no_server(tmp_path, content):
    with sole_server(tmp_path):
        (tmp_path / "server.json").write_bytes(content)
        assert find_server(tmp_path) is None
