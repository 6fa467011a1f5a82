"""The client of a running server, against servers whose replies are written here."""

import socket
import threading
import time

import pytest

from kvweave.cancellation import cancellable
from kvweave.errors import Cancelled, InvalidRequest, ServerBusy, ServerRefused, ServerUnavailable
from kvweave.results import Answer, Plan, Timing
from kvweave.server import client as client_module
from kvweave.server import knowledge_bases
from kvweave.server.client import ServerClient
from kvweave.server.openai import replies
from kvweave.server.serving.completions import Finished
from support.scripted_server import DONE, error, event, reply, serving, stream

ASK = "POST /v1/kb/default/ask"


def ask(server, **options):
    with ServerClient(server.url, "k", busy_s=options.pop("busy_s", 0)) as client:
        pieces = []
        answer, tokens = client.ask("default", "What?", options, pieces.append)
        return pieces, answer, tokens


def test_an_answer_comes_in_pieces_and_is_whole_in_the_end():
    events = [
        b": ping\n\n",
        event("progress", {"done": 1, "total": 2}),
        event("piece", {"text": "wal"}),
        event("piece", {"text": "nut"}),
    ]
    with serving({ASK: [stream(*events, event("done", DONE))]}) as server:
        pieces, answer, tokens = ask(server, ratio=0.2)
    assert pieces == ["wal", "nut"]
    assert answer.text == "walnut"
    assert answer.plan.spans[0].tokens == 4
    assert answer.sources[0].document == "/d/a.md"
    assert tokens[0].text == "What"
    ((_, headers, body),) = server.requests
    assert headers["Authorization"] == "Bearer k"
    assert body == {"question": "What?", "stream": True, "ratio": 0.2}


def test_a_proxy_for_other_addresses_is_not_asked(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving({ASK: [stream(event("done", DONE))]}) as server:
        assert ask(server)[1].text == "walnut"


def test_pieces_come_when_they_are_sent():
    go_on = threading.Event()

    def parts():
        yield event("piece", {"text": "first"})
        assert go_on.wait(10)
        yield event("done", DONE)

    with serving({ASK: [lambda _: (200, {}, parts())]}) as server, ServerClient(server.url) as client:
        client.ask("default", "What?", {}, lambda piece: go_on.set())


def test_a_question_that_is_given_up_is_waited_for_no_longer():
    def pings():
        while True:  # until the client has closed the connection
            yield b": ping\n\n"
            time.sleep(0.01)

    looks = iter([False] * 5)
    with (
        serving({ASK: [lambda _: (200, {}, pings())]}) as server,
        cancellable(lambda: next(looks, True)),
        pytest.raises(Cancelled),
    ):
        ask(server)


def test_events_cut_anywhere_and_letters_of_several_bytes_are_read():
    whole = event("piece", {"text": "x"}).replace(b'"x"', '"Größe\u2028ℵ"'.encode()) + event("done", DONE)
    for size in (1, 3, 7):
        parts = [whole[at : at + size] for at in range(0, len(whole), size)]
        with serving({ASK: [stream(*parts)]}) as server:
            assert ask(server)[0] == ["Größe\u2028ℵ"]


def test_names_are_quoted_and_broken_bytes_of_a_terminal_are_replaced():
    path = "POST /v1/kb/a%2F..%2F%3Fb/ask"
    with serving({path: [stream(event("done", DONE))]}) as server, ServerClient(server.url) as client:
        client.ask("a/../?b", "Wh\udcff?", {}, print)
    assert server.requests[0][2]["question"] == "Wh??"


@pytest.mark.parametrize("ending", [[], [None]])
def test_a_stream_that_ends_early_is_an_error(ending):
    early = stream(event("piece", {"text": "wal"}), *ending)
    with serving({ASK: [early]}) as server, pytest.raises(ServerUnavailable, match="does not respond"):
        ask(server)


def test_an_error_in_the_stream_is_the_servers_own():
    failed = event("error", {"error": {"message": "the index is lost", "type": "server_error"}})
    with serving({ASK: [stream(failed)]}) as server, pytest.raises(ServerRefused, match="the index is lost"):
        ask(server)


def test_a_refusal_carries_message_and_status():
    with serving({ASK: [error("no such recipe", 400)]}) as server, pytest.raises(ServerRefused) as refused:
        ask(server)
    assert (str(refused.value), refused.value.status) == ("no such recipe", 400)


def test_a_busy_server_is_asked_again_until_the_time_is_over():
    busy = error("too many", 429, Retry_After="0")
    with serving({ASK: [busy, busy, stream(event("done", DONE))]}) as server:
        assert ask(server, busy_s=5)[1].text == "walnut"
        assert len(server.requests) == 3
    busy = error("too many", 429, Retry_After="60")
    with serving({ASK: [busy]}) as server, pytest.raises(ServerBusy, match="too many"):
        ask(server, busy_s=1)


def test_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ServerUnavailable, match="does not respond"):
        ServerClient(f"http://127.0.0.1:{port}").settings()


def test_a_silent_server_is_given_up(monkeypatch):
    monkeypatch.setattr(client_module, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="timed out"):
            ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}").settings()
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\xff\xfe"])
def test_something_else_that_listens_is_named(body):
    with (
        serving({"GET /v1/settings": [(200, {}, [body])]}) as server,
        ServerClient(server.url) as client,
        pytest.raises(ServerUnavailable, match="not JSON"),
    ):
        client.settings()


@pytest.mark.parametrize("missing", ["answer", "plan", "sources", "timing"])
def test_an_answer_of_another_version_is_named(missing):
    done = {name: value for name, value in DONE.items() if name != missing}
    with (
        serving({ASK: [stream(event("done", done))]}) as server,
        pytest.raises(ServerUnavailable, match="the same version of kvweave"),
    ):
        ask(server)


@pytest.mark.parametrize("supported", [True, False, None])
def test_whether_the_passages_hold_an_answer_goes_with_it(supported):
    answer = Answer("walnut", (), Plan("reuse", 0.0, ()), Timing(), supported=supported)
    finished = Finished(answer, "walnut", 7, 2, 1, tuple)
    assert replies.kvweave(finished)["supported"] is supported
    with serving({ASK: [stream(event("done", knowledge_bases.done(finished)))]}) as server:
        assert ask(server)[1] == answer


def test_unknown_entries_of_a_newer_server_are_ignored():
    done = {**DONE, "mood": "good", "timing": {**DONE["timing"], "queue_s": 1.0}}
    with serving({ASK: [stream(event("mood", {}), event("done", done))]}) as server:
        assert ask(server)[1].timing.total_s == 0.2


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:8420", "ftp://x", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InvalidRequest, match="is not the address of a server"):
        ServerClient(url)


def test_lists_of_knowledge_bases_and_documents():
    replies = {
        "GET /v1/kb": [reply({"data": [{"name": "default", "documents": 1, "chunks": 2, "bytes": 3}]})],
        "GET /v1/kb/default": [reply({"name": "default", "documents": [{"source": "/a", "title": "a"}]})],
    }
    with serving(replies) as server, ServerClient(server.url) as client:
        assert client.knowledge_bases()[0]["chunks"] == 2
        assert client.documents("default")[0]["source"] == "/a"
