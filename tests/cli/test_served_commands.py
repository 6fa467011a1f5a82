"""ask and chat give the same through a running server as by themselves."""

import json
import math
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import httpx
import pytest

from kvweave.server.process.discovery import find_server
from support.processes import Program

GLORRIC = "What is the password of Glorric?"
BADGE = "What colour is the badge of the glazier?"


@pytest.fixture(scope="module")
def home(tmp_path_factory, indexed_once):
    """A home with a filled knowledge base, for all tests here."""
    return Path(shutil.copytree(indexed_once / "home", tmp_path_factory.mktemp("served") / "home"))


@pytest.fixture(scope="module")
def server(home):
    """The running server of the home, from when it tells systemd that it is ready."""
    address = str(home.parent / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        Program(
            ["-m", "kvweave", "serve", "--port", "0", "--no-idle-work", "--home", home],
            {**os.environ, "NOTIFY_SOCKET": address},
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
        ) as process,
    ):
        try:
            systemd.bind(address)  # long before the model is loaded
            assert _told(systemd, process) == b"READY=1"
            found = find_server(home)
            assert httpx.get(f"{found.url}/health").status_code == 200
            yield found
        finally:
            process.terminate()
            process.wait(timeout=60)
        assert systemd.recv(100) == b"STOPPING=1"
    assert find_server(home) is None


def _told(systemd, process, patience_s=240):
    """What the server tells systemd first; fails at once where the server has ended."""
    systemd.settimeout(1)
    until_s = time.monotonic() + patience_s
    while True:
        with suppress(TimeoutError):
            return systemd.recv(100)
        assert process.poll() is None, f"the server ended with exit code {process.returncode}"
        assert time.monotonic() < until_s, "the server is not ready in time"


@pytest.fixture
def environment(environment, home):
    return environment | {"KVWEAVE_HOME": str(home)}


def without_times(printed):
    """The output without measured times, and without what says where the answer came from."""
    lines = [line for line in printed.splitlines() if not line.startswith("answered by the server")]
    return [re.sub(r"\d+(\.\d+)? m?s\b", "TIME", line).rstrip() for line in lines]


def facts_without_times(facts):
    """What an answer holds besides times, and its tokens' scores apart."""
    facts = {name: value for name, value in facts.items() if name not in ("timing", "server")} | {
        "tokens counted": facts["timing"]["answer_tokens"]
    }
    scores = [
        math.nan if (score := token.pop("score")) is None else score for token in facts.get("tokens", [])
    ]
    return facts, scores


def test_ask_prints_the_same(server, command):
    for words in ([], ["--explain"], ["--recipe", "prefix", "--explain"], ["--top-k", "2", "--ratio", "0.5"]):
        asked = ["ask", GLORRIC, "--fresh", *words]
        command(*asked, "--no-server")  # stores what is exact, so that both of the next find the same
        here = command(*asked, "--no-server").stdout
        there = command(*asked).stdout
        assert here.startswith("walnut\n")
        assert without_times(there) == without_times(here)
        assert ("answered by the server" in there) == ("--explain" in words)


def test_ask_gives_the_same_json(server, command):
    for words in (
        [],
        ["--explain"],
        ["--coverage", "0.5"],
        ["--max-new-tokens", "3"],
        ["--temperature", "0.7"],
    ):
        asked = ["ask", BADGE, "--fresh", *words]
        variables = {"KVWEAVE_SEED": "7"}
        command(*asked, "--no-server", **variables)
        here = json.loads(command(*asked, "--no-server", "--json", **variables).stdout)
        there = json.loads(command(*asked, "--json", **variables).stdout)
        assert there["server"] == {"url": server.url, "used": True}
        assert "server" not in here
        (facts, scores), (served_facts, served_scores) = facts_without_times(here), facts_without_times(there)
        assert served_facts == facts
        assert served_scores == pytest.approx(
            scores, rel=1e-3, nan_ok=True
        )  # the server sums attention in another order
        assert set(there["timing"]) == set(here["timing"])


def test_a_cached_answer_is_the_same(server, command):
    first = command.json("ask", GLORRIC)
    here, there = command.json("ask", GLORRIC, "--no-server"), command.json("ask", GLORRIC)
    assert there["plan"]["cache_hit"] == here["plan"]["cache_hit"] is not None
    assert there["text"] == here["text"] == first["text"] == "walnut"


def test_a_conversation_goes_on_in_either_way(server, command):
    turns = [GLORRIC, BADGE, "And what is the password of Glorric?"]
    here = [command("chat", "--name", "here", "--no-server", input_text=f"{turn}\n").stdout for turn in turns]
    there = [command("chat", "--name", "there", input_text=f"{turn}\n").stdout for turn in turns]
    mixed = [
        command(
            "chat", "--name", "mixed", *(["--no-server"] if count % 2 else []), input_text=f"{turn}\n"
        ).stdout
        for count, turn in enumerate(turns)
    ]
    assert here[0].startswith("walnut")
    assert there == here
    assert mixed == here
    again = command("chat", "--name", "there", "--new", input_text=f"{turns[0]}\n").stdout
    assert again == here[0]


def test_errors_are_the_same(server, command):
    for words in (
        ["  "],
        [GLORRIC, "--top-k", "0"],
        [GLORRIC, "--recipe", "no such"],
        [GLORRIC, "--kb", "none"],
    ):
        here = command("ask", *words, "--no-server", code=1).stderr
        assert command("ask", *words, code=1).stderr == here
    here = command("chat", "--name", "a/b", "--no-server", input_text="x\n", code=1).stderr
    assert command("chat", "--name", "a/b", input_text="x\n", code=1).stderr == here


def test_two_chats_in_one_conversation_do_not_corrupt_it(server, command):
    url = f"{server.url}/v1/kb/default/conversations/both"

    def send(stream):
        body = {"question": GLORRIC, "stream": stream}
        return httpx.post(url, json=body, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(send, [False, True] * 3))
    assert {reply.status_code for reply in replies} <= {200, 400}
    assert 200 in {reply.status_code for reply in replies}
    assert all("has the conversation" in reply.text for reply in replies if reply.status_code == 400)
    assert "walnut" in send(False).json()["answer"]


def test_a_conversation_keeps_the_kv_budget_it_began_with(server):
    url = f"{server.url}/v1/kb/default/conversations/budget"

    def send(question, **more):
        return httpx.post(url, json={"question": question, **more}, timeout=60)

    assert send(GLORRIC, kv_budget=0.5).status_code == 200
    assert send("And what is the password again?").status_code == 200
    refused = send(GLORRIC, kv_budget=0.25)
    assert refused.status_code == 400
    assert "began with kv_budget 0.5, not 0.25" in refused.json()["error"]["message"]


def test_an_answer_of_another_question_is_rejected(server):
    base = f"{server.url}/v1/kb/default"
    httpx.post(f"{base}/ask", json={"question": GLORRIC}, timeout=60)
    again = {"question": "password of Glorric, what is it"}
    refused = httpx.post(f"{base}/reject", json=again)
    assert refused.status_code == 400
    assert "got no answer of another question" in refused.json()["error"]["message"]
    again = {"question": "The password of Glorric?"}
    assert httpx.post(f"{base}/ask", json=again, timeout=60).json()["plan"]["cache_hit"]
    assert httpx.post(f"{base}/reject", json=again).json() == {"rejected": [GLORRIC]}
    assert httpx.post(f"{base}/ask", json=again, timeout=60).json()["plan"]["cache_hit"] is None


def test_search_finds_the_passages_of_the_answer(server, command):
    answer = command.json("ask", GLORRIC, "--fresh", "--top-k", "3")
    found = httpx.post(
        f"{server.url}/v1/kb/default/search", json={"question": GLORRIC, "top_k": 3}, timeout=60
    ).json()["data"]
    assert sorted(found, key=str) == sorted(answer["sources"], key=str)
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    refused = httpx.post(f"{server.url}/v1/kb/none/search", json={"question": GLORRIC})
    assert refused.status_code in (404, 409)
    assert "there is no knowledge base 'none'" in refused.json()["error"]["message"]
    assert httpx.post(f"{server.url}/v1/kb/default/search", json={"question": ""}).status_code == 400
