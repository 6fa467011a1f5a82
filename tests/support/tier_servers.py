"""Real servers for the tests of shared tiers, each on a free port, stopped and started by the tests."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_WITHIN_S = 90.0
BUCKET = "chunks"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "something",
    "AWS_REGION": "us-east-1",
}


SHARED = ("redis", "s3", "folder")
"""Every kind of shared tier."""


class Server:
    """A server process that can be killed and started again on the same port.

    `ping` is a request, and the reply of a server that is ready; without it one that accepts connections is.
    """

    def __init__(
        self, command: list[str], port: int, log: Path, ping: tuple[bytes, bytes] | None = None
    ) -> None:
        self.port = port
        self._ping = ping
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            if self._is_ready():
                return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, f"no answer: {self._log.read_text()}"
            time.sleep(0.02)

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                if self._ping is None:
                    return True
                connection.sendall(self._ping[0])
                return connection.recv(100).startswith(self._ping[1])
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """A Redis or Valkey server whose data survives a restart."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip(
            "neither redis-server nor valkey-server is installed (Debian: apt-get install redis-server)"
        )
    folder.mkdir(exist_ok=True)
    port = free_port()
    words = ("--port", port, "--bind", "127.0.0.1", "--dir", folder, "--appendonly", "yes", "--save", "")
    server = Server(
        [program, *map(str, words), "--appendfsync", "always"], port, folder / "log", (b"PING\r\n", b"+PONG")
    )
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    """An S3 server with one bucket; its data is lost with the process."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    server = Server([sys.executable, "-m", "moto.server", "-p", str(port)], port, folder / "log")
    server.start()
    try:
        make_bucket(server)
        yield server
    finally:
        server.kill()


def make_bucket(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}/{BUCKET}"
    request = urllib.request.Request(url, method="PUT", headers={"Host": f"127.0.0.1:{server.port}"})
    with urllib.request.urlopen(request, timeout=30):
        pass


def s3_environment(server: Server) -> dict[str, str]:
    """The environment that tells obstore where the server is."""
    return {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}


def url_of(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The address of a shared tier; its server runs."""
    if name == "folder":
        return f"file://{folder}/shared"
    server: Server = request.getfixturevalue(name)
    if name == "redis":
        return f"redis://127.0.0.1:{server.port}/0"
    for variable, value in s3_environment(server).items():
        monkeypatch.setenv(variable, value)
    return f"s3://{BUCKET}/some/prefix"
