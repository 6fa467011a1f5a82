"""A server in a thread of the test's process, on a free port of this machine."""

import socket
import threading
import time
from contextlib import contextmanager

import httpx

from kvweave.config import read_config
from kvweave.samples import CHUNK_TOKENS, TOP_K
from kvweave.server.process.lifecycle import Running
from kvweave.server.serving.tenants import tenants_of


class TestedServer:
    """A running server: its url, its parts, and an HTTP client for it."""

    def __init__(self, running, url, key=None):
        self.running, self.url = running, url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, timeout=60, headers=headers, trust_env=False)

    @property
    def parts(self):
        return self.running.services

    @property
    def address(self):
        return self.http.base_url.host, self.http.base_url.port

    def wait(self, condition, timeout_s=20.0):
        until_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until_s, "it has not happened in time"
            time.sleep(0.01)


@contextmanager
def server(home, *, ready=True, key=None, **settings):
    """Run a server with these settings; `key` is the one that its client sends."""
    given = {
        "chunk_tokens": CHUNK_TOKENS,
        "top_k": TOP_K,
        "idle_work": False,
        "ping_s": 0.2,
        "client_timeout_s": 2.0,
        "grace_s": 5.0,
        **settings,
    }
    config = read_config(home, {}, **given)
    running = Running(config, tenants_of(config.server))
    with socket.create_server(("127.0.0.1", 0), backlog=2000) as listening:
        host, port = listening.getsockname()
        thread = threading.Thread(target=running.run_on, args=(listening,))
        thread.start()
        try:
            tested = TestedServer(running, f"http://{host}:{port}", key)
            with tested.http:
                if ready:
                    tested.wait(lambda: tested.http.get("/health").status_code == 200, 60)
                yield tested
        finally:
            running.end()
            running.end()
            thread.join(30)
            assert not thread.is_alive()
