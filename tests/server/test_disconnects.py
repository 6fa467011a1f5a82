"""A client that leaves, at every stage, frees what its request holds; ends of the server lose no request."""

import json
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest

from kvweave.cancellation import check_cancelled
from kvweave.knowledge_base import KnowledgeBase

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def open_request(running, path="/v1/chat/completions", **body):
    """Send a request on a connection of its own, and return the connection."""
    connection = socket.create_connection(running.address, timeout=10)
    content = json.dumps(body if "input" in body else {**BODY, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection, text):
    found = b""
    while text not in found:
        data = connection.recv(4096)
        assert data, found
        found += data
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prompt", "pieces"])
def test_leaving_cancels_a_running_request(fake, stage, stream):
    with fake() as running:
        engine = running.parts.serving
        getattr(engine, f"{stage}_may_go").clear()
        connection = open_request(running, stream=stream)
        running.wait(lambda: engine.running == 1)
        if stream and stage == "pieces":
            read_until(connection, b"\r\n\r\n")
        connection.close()
        running.wait(lambda: engine.running == 0)
        assert engine.log == ["Cancelled"]
        running.wait(lambda: not running.parts.busy)


def test_leaving_ends_work_that_has_no_events(fake):
    began, ended = threading.Event(), threading.Event()

    class Encoder:
        name = "slow"

        def encode(self, texts):
            began.set()
            try:
                for _ in range(1000):
                    check_cancelled()
                    time.sleep(0.01)
            finally:
                ended.set()

    with fake() as running:
        running.parts.serving.resident.encoder = Encoder()
        connection = open_request(running, "/v1/embeddings", input="hello")
        assert began.wait(10)
        connection.close()
        assert ended.wait(5)
        running.wait(lambda: not running.parts.busy)


def test_leaving_the_queue_gives_the_place_to_the_next(fake):
    with fake(max_running=1, max_queue=2) as running:
        engine = running.parts.serving
        engine.prompt_may_go.clear()
        first = open_request(running)
        running.wait(lambda: engine.running == 1)
        waiting = [open_request(running) for _ in range(2)]
        running.wait(lambda: running.parts.questions.waiting == 2)
        waiting[0].close()
        running.wait(lambda: running.parts.questions.waiting == 1)
        engine.prompt_may_go.set()
        for connection in (first, waiting[1]):
            assert b"200 OK" in read_until(connection, b"finish_reason")
            connection.close()
        assert engine.log == ["finished", "finished"]


def test_leaving_while_the_body_comes_starts_nothing(fake):
    with fake() as running:
        connection = socket.create_connection(running.address)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        connection.close()
        assert running.http.post("/v1/chat/completions", json=BODY).status_code == 200
        assert running.parts.serving.log == ["finished"]


@pytest.mark.parametrize("sent", ["the headers", "half of the file", "all"])
def test_leaving_an_upload_adds_nothing_and_closes_its_files(served, monkeypatch, sent):
    started, ended = threading.Event(), threading.Event()

    def add(base, *paths, **options):
        started.set()
        try:
            while True:
                check_cancelled()
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(KnowledgeBase, "add", add)
    before = served.http.get("/v1/kb/notes").json()["documents"]
    content = b"The ferry leaves at nine. " * 50_000
    form = (
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="left.txt"\r\n\r\n'
        + content
        + b"\r\n--b--\r\n"
    )
    head = (
        "POST /v1/kb/notes/documents HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(form)}\r\n\r\n"
    ).encode()
    connection = socket.create_connection(served.address, timeout=10)
    connection.sendall(head + form[: {"the headers": 0, "half of the file": len(form) // 2}.get(sent)])
    if sent == "all":
        assert started.wait(10)
    connection.close()
    served.wait(lambda: not served.parts.busy)
    assert started.is_set() == ended.is_set() == (sent == "all")
    monkeypatch.undo()
    assert served.http.get("/v1/kb/notes").json()["documents"] == before


def test_a_full_queue_answers_429(fake):
    with fake(max_running=1, max_queue=1) as running:
        engine = running.parts.serving
        engine.prompt_may_go.clear()
        held = [open_request(running) for _ in range(2)]
        running.wait(lambda: running.parts.questions.waiting == 1)
        refused = running.http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        text = running.http.get("/metrics").text
        assert "kvweave:num_requests_running 1.0" in text
        assert "kvweave:num_requests_waiting 1.0" in text
        engine.prompt_may_go.set()
        for connection in held:
            read_until(connection, b"finish_reason")
            connection.close()


def test_a_silent_stream_sends_pings(fake):
    with fake(ping_s=0.1) as running:
        engine = running.parts.serving
        engine.pieces_may_go.clear()
        with running.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            lines = reply.iter_lines()
            assert any(line == ": ping" for line in lines)
            engine.pieces_may_go.set()
            assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BODY),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/kb/notes/ask", {"question": "hello"}),
    ],
)
def test_an_event_is_whole_for_clients_that_cut_lines_as_python_does(fake, path, body):
    said = "a\u2028b\u2029c\x85d\u00e4"
    with fake(engine={"piece_text": said, "pieces": 1}) as running:
        text = running.http.post(path, json={**body, "stream": True}).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert all(line.startswith(("data: ", "event: ", ":")) for line in text.splitlines() if line)
    assert said in [each for line in data if line != "[DONE]" for each in texts(json.loads(line))]


def texts(value):
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [text for each in inner for text in texts(each)]
    return [value]


def test_an_error_within_a_stream_is_its_last_event(fake):
    with fake(ping_s=0.05, engine={"error": RuntimeError("a secret of the server")}) as running:
        engine = running.parts.serving
        engine.prompt_may_go.clear()
        with running.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": ping"
            engine.prompt_may_go.set()
            rest = [line for line in lines if line.startswith("data")]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "server_error"
    assert "secret" not in rest[-1]


def test_an_error_inside_is_not_shown(fake):
    with fake(engine={"error": RuntimeError("a secret of the server")}) as running:
        found = running.http.post("/v1/chat/completions", json=BODY)
        assert found.status_code == 500
        assert "secret" not in found.text
        assert found.headers["X-Request-Id"].startswith("req_")


def test_a_client_that_does_not_read_its_stream_is_cut_off(fake):
    engine = {"pieces": 100_000, "piece_text": "x" * 1000}
    with fake(client_timeout_s=0.5, engine=engine) as running:
        connection = open_request(running, stream=True)
        running.wait(lambda: not running.parts.busy and running.parts.serving.log, 30)
        time.sleep(1.5)
        got = b""
        with connection, suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                got += part
        assert b"[DONE]" not in got
        assert len(got) < 50_000_000


def test_the_first_signal_lets_requests_finish_and_refuses_new_ones(fake):
    with fake() as running:
        engine = running.parts.serving
        engine.pieces_may_go.clear()
        connection = open_request(running)
        running.wait(lambda: engine.running == 1)
        running.running.end()
        refused = running.http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert running.http.get("/health").json() == {"status": "draining"}
        engine.pieces_may_go.set()
        assert b"200 OK" in read_until(connection, b"finish_reason")
        connection.close()
    assert engine.log == ["finished"]
    assert engine.closed


@pytest.mark.parametrize("how", ["second signal", "grace is over"])
def test_requests_that_do_not_finish_are_cancelled(fake, how):
    with fake(grace_s=60.0 if how == "second signal" else 0.2) as running:
        engine = running.parts.serving
        engine.pieces_may_go.clear()
        connection = open_request(running)
        running.wait(lambda: engine.running == 1)
        running.running.end()
        if how == "second signal":
            running.running.end()
        running.wait(lambda: engine.closed)
        assert engine.log == ["Cancelled"]
        connection.close()


def test_while_the_model_loads_health_says_so(fake):
    with fake(ready=False, engine={"load_s": 1.0}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 503)
        running.wait(lambda: running.parts is not None)
        refused = running.http.post("/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        running.wait(lambda: running.http.get("/health").status_code == 200)


def test_many_requests_at_once_are_all_answered(fake):
    with fake(max_running=4, max_queue=100) as running:
        replies = []

        def ask():
            with httpx.Client(base_url=running.url, trust_env=False, verify=False, timeout=30) as http:
                replies.append(http.post("/v1/chat/completions", json=BODY).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == [200] * 40
