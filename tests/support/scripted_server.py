"""A server whose replies a test writes: what a client must make of a server that is busy, silent, broken or gone."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvweave.config import read_config
from kvweave.server.operations import list_settings
from kvweave.server.process import discovery


def event(kind, data):
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def reply(data, status=200, **headers):
    """A whole reply as JSON."""
    return status, headers, [json.dumps(data).encode()]


def error(message, status, **headers):
    return reply({"error": {"message": message, "type": "invalid_request_error"}}, status, **headers)


def stream(*events):
    """A stream of server-sent events; a test ends it early by leaving out `done`."""
    return 200, {"Content-Type": "text/event-stream"}, events


def settings(home, **given):
    """What a server with these settings answers to GET /v1/settings."""
    return reply({"data": list_settings(read_config(home, {}, **given))})


DONE = {
    "answer": "walnut",
    "sources": [{"document": "/d/a.md", "start": 0, "end": 9, "text": "A passage", "score": 0.5}],
    "plan": {
        "recipe": "weave", "ratio": 0.1, "coverage": None, "cache_hit": None, "prompt_tokens": 4,
        "spans": [
            {"kind": "question", "start": 0, "end": 4, "origin": "fresh", "recomputed_tokens": 0, "reason": "why", "chunk": -1}
        ],
    },
    "timing": {"ttft_s": 0.1, "total_s": 0.2},
    "decoding": None,
    "reasoning": "",
    "finish_reason": "stop",
    "tokens": [{"id": 1, "text": "What", "origin": "fresh"}],
}  # fmt: skip
"""The data of an event `done`."""


class ScriptedServer:
    """Serves on a free port. `replies` maps "METHOD path" to a list of replies, or to functions of the body; the last stays."""

    def __init__(self, replies):
        self.replies = {name: list(each) for name, each in replies.items()}
        self.requests = []
        """Method and path, headers, body of every request."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self):
                scripted.answer(self)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815  as the standard library calls them

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, handler):
        name = f"{handler.command} {handler.path}"
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        asked = json.loads(body) if body else None
        self.requests.append((name, dict(handler.headers), asked))
        left = self.replies.get(name)
        if left is None:
            status, headers, parts = error(f"no such path: {name}", 404)
        else:
            chosen = left.pop(0) if len(left) > 1 else left[0]
            status, headers, parts = chosen(asked) if callable(chosen) else chosen
        with suppress(OSError):
            handler.send_response(status)
            for key, value in {"Transfer-Encoding": "chunked", **headers}.items():
                handler.send_header(key.replace("_", "-"), value)
            handler.end_headers()
            for part in parts:
                if part is None:  # dies here
                    handler.wfile.flush()
                    handler.connection.shutdown(2)
                    return
                handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            handler.wfile.write(b"0\r\n\r\n")

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def serving(replies, home=None):
    """Run a scripted server, as that of a home folder if one is named."""
    server = ScriptedServer(replies)
    try:
        if home is None:
            yield server
        else:
            with discovery.sole_server(home):
                discovery.record(home, server.url)
                yield server
    finally:
        server.close()
