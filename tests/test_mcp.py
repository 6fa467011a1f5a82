"""The MCP server under the official client, over both transports, with the shipped model."""

import asyncio
import json
import re
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from subprocess import DEVNULL

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.stdio import stdio_server

from kvweave.cancellation import check_cancelled
from kvweave.config import read_config
from kvweave.results import Answer, Plan, Source, Timing
from kvweave.server.mcp.sources import HomeSource
from kvweave.server.mcp.tools import mcp_server
from kvweave.server.process.lifecycle import is_loopback
from support.processes import Program
from support.scripted_server import DONE, event, reply, serving, settings, stream

GLORRIC = "What is the password of Glorric?"
SENDBEL = "What is the password of Sendbel?"
TOOLS = {"list_knowledge_bases", "list_documents", "search_passages", "answer"}


@pytest.fixture
def documents(indexed_once):
    return indexed_once / "documents"


@pytest.fixture
def home(indexed_home):
    """A test's own copy of a home in which the documents are indexed."""
    return indexed_home


@asynccontextmanager
async def over_stdio(environment, *words):
    """The official client's way to a `kvweave mcp`; it is forked, so that it need not import everything again."""
    with Program(["-m", "kvweave", "mcp", *words], environment, stderr=DEVNULL) as process:
        async with stdio_server(anyio.wrap_file(process.stdout), anyio.wrap_file(process.stdin)) as streams:
            try:
                yield streams
            finally:
                process.stdin.close()  # what ends it


@contextmanager
def listening(environment, *words, key=None, errors=""):
    """Run `kvweave mcp --http` on a free port; yield its address."""
    with Program(
        ["-m", "kvweave", "mcp", "--http", "--port", "0", *words],
        environment | ({"KVWEAVE_API_KEY": key} if key else {}),
    ) as process:
        try:
            line = process.stderr.readline()
            found = re.search(r"listens on (http://\S+)", line)
            assert found, line + process.stderr.read()
            yield found[1]
        finally:
            process.terminate()
            out, logged = process.communicate(timeout=30)
        assert out == ""
        assert re.fullmatch(errors, logged), logged
        assert process.returncode in (0, -15)


@asynccontextmanager
async def with_key(url, key):
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def run(target, work):
    """Run `work` with a connected official client."""

    async def connected():
        async with Client(target, read_timeout_seconds=120) as client:
            return await work(client)

    return asyncio.run(connected())


async def result(client, tool, **arguments):
    given = await client.call_tool(tool, arguments)
    assert not given.is_error, given.content
    content = given.structured_content
    return content["result"] if set(content) == {"result"} else content


async def failure(client, tool, **arguments):
    given = await client.call_tool(tool, arguments)
    assert given.is_error
    return given.content[0].text


async def everything(client, documents):
    """Use every tool and see the errors."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == TOOLS
    assert all(tool.annotations.read_only_hint and tool.output_schema for tool in tools.values())
    assert tools["answer"].input_schema["required"] == ["question"]
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools.values())

    (listed,) = await result(client, "list_knowledge_bases")
    assert (listed["name"], listed["documents"]) == ("default", 3)
    assert listed["chunks"] > 3
    found = await result(client, "list_documents")
    assert {each["title"] for each in found} == {"passwords.md", "badges.txt", "supper.md"}
    assert sum(each["chunks"] for each in found) == listed["chunks"]

    passages = await result(client, "search_passages", question=GLORRIC, top_k=2)
    assert len(passages) == 2
    assert passages[0]["score"] >= passages[1]["score"]
    assert "Glorric" in passages[0]["text"]
    text = (documents / "passwords.md").read_text()
    assert passages[0]["text"] == text[passages[0]["start"] : passages[0]["end"]]

    given = await result(client, "answer", question=GLORRIC)
    assert given["answer"] == "walnut"
    assert str(documents / "passwords.md") in {each["document"] for each in given["sources"]}

    assert "there is no knowledge base 'other'" in await failure(
        client, "list_documents", knowledge_base="other"
    )
    assert "is not usable" in await failure(client, "answer", question="x", knowledge_base="../default")
    assert "the question is empty" in await failure(client, "answer", question="  ")
    assert "top_k" in await failure(client, "search_passages", question="x", top_k=0)
    assert "question" in await failure(client, "answer")
    assert "kb" in await failure(client, "answer", question=GLORRIC, kb="first")  # not the default's answer
    assert (await result(client, "answer", question=GLORRIC))["answer"] == "walnut"  # goes on after errors


def test_all_tools_over_stdio(home, environment, documents):
    run(over_stdio(environment), lambda client: everything(client, documents))


def test_over_http_all_tools_work_for_several_clients_at_once_and_no_page_of_another_origin(
    home, environment, documents
):
    async def ask(url):
        async with Client(url, read_timeout_seconds=120) as client:
            return await result(client, "answer", question=SENDBEL)

    async def ask_all(url):
        return await asyncio.gather(*(ask(url) for _ in range(4)))

    refusals = "WARNING: Invalid Host header.*\nWARNING: Invalid Origin header.*\n"
    with listening(environment, errors=refusals) as url:
        run(url, lambda client: everything(client, documents))
        assert [each["answer"] for each in asyncio.run(ask_all(url))] == ["lantern"] * 4
        for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            refused = httpx2.post(url, headers={"Content-Type": "application/json", **header}, content="{}")
            assert refused.status_code in (403, 421)


def test_standard_output_carries_the_protocol_alone(home, environment):
    """Also where a tool prints: what would break an agent's connection."""
    code = """
import sys
from kvweave.server.mcp import sources as mcp_sources
searched = mcp_sources.HomeSource.search
def search(*args):
    print("a library prints")
    import os
    os.write(1, b"and one that is written in C\\n")
    return searched(*args)
mcp_sources.HomeSource.search = search
sys.argv = ["kvweave", "mcp"]
from kvweave.__main__ import main
main()
"""
    first = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    call = {"name": "search_passages", "arguments": {"question": GLORRIC}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": first},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
        "no protocol",
    ]
    with Program(["-c", code], environment) as process:
        for message in messages:
            process.stdin.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
        process.stdin.flush()
        lines = [process.stdout.readline()]
        while json.loads(lines[-1]).get("id") != 2:
            lines.append(process.stdout.readline())
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    for line in [*lines, *out.splitlines()]:
        assert json.loads(line)["jsonrpc"] == "2.0"
    assert "Glorric" in lines[-1]
    assert "a library prints" in errors
    assert "and one that is written in C" in errors
    assert "Traceback" not in errors


class ScriptedBase:
    """A knowledge base whose answer to "long" takes a minute, unless the question is given up."""

    def __init__(self, text="walnut"):
        self.text, self.began, self.gone = text, threading.Event(), threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, question, top_k=None):
        if question == "long":
            self.began.set()
            try:
                for _ in range(600):
                    check_cancelled()
                    time.sleep(0.1)
            finally:
                self.gone.set()
        source = Source("/d/a.txt", 0, len(self.text), self.text, 1.0)
        return Answer(self.text, (source,), Plan("prefix", 0.0, ()), Timing())


def with_base(home, base, work):
    """Run `work` with a client of a server in this process that opens `base`."""
    with HomeSource(read_config(home, {}, use_server=False), lambda name: base) as source:
        return run(mcp_server(source, "default"), work)


def test_a_cancelled_call_ends_its_work_and_frees_the_model(tmp_path):
    base = ScriptedBase()

    async def work(client):
        calls = [asyncio.create_task(result(client, "answer", question="long")) for _ in range(2)]
        await asyncio.to_thread(base.began.wait, 10)
        for call in reversed(calls):  # the one that waits for the other first
            call.cancel()
        assert (await result(client, "answer", question="short"))["answer"] == "walnut"
        assert base.gone.is_set()

    began = time.monotonic()
    with_base(tmp_path, base, work)
    assert time.monotonic() - began < 30


def test_a_message_is_whole_for_clients_that_cut_lines_as_python_does(tmp_path):
    async def work(client):
        return await client.call_tool("answer", {"question": "short"})

    found = with_base(tmp_path, ScriptedBase("a\u2028b\u2029c\x85d"), work)
    assert len(found.model_dump_json().splitlines()) == 1
    assert (
        found.structured_content["answer"] == found.structured_content["sources"][0]["text"] == "a\nb\nc\nd"
    )


def test_a_running_server_of_the_home_is_used(home, environment):
    replies = {
        "GET /v1/settings": [settings(home, chunk_tokens=48)],
        "GET /v1/kb": [reply({"data": [{"name": "far", "documents": 1, "chunks": 2, "bytes": 3}]})],
        "GET /v1/kb/default": [
            reply({"documents": [{"source": "/a", "title": "a", "chunks": 1, "tokens": 9}]})
        ],
        "POST /v1/kb/default/search": [reply({"data": DONE["sources"]})],
        "POST /v1/kb/default/ask": [stream(event("done", {**DONE, "answer": "from afar"})), stream(None)],
    }

    async def work(client):
        assert (await result(client, "list_knowledge_bases"))[0]["name"] == "far"
        assert (await result(client, "list_documents"))[0]["source"] == "/a"
        assert (await result(client, "search_passages", question="x"))[0]["text"] == "A passage"
        assert (await result(client, "answer", question=GLORRIC, top_k=2))["answer"] == "from afar"
        assert (await result(client, "answer", question=GLORRIC))["answer"] == "walnut"  # the server is gone

    with serving(replies, home) as server:
        run(over_stdio(environment), work)
    asked = [body for name, _, body in server.requests if name.endswith("/ask")]
    assert asked == [
        {"question": GLORRIC, "stream": True, "top_k": 2},
        {"question": GLORRIC, "stream": True},
    ]


def test_http_with_a_key(home, environment):
    with listening(environment, "--host", "0.0.0.0", key="first-key, second-key") as url:
        url = url.replace("0.0.0.0", "127.0.0.1")
        for key in ("first-key", "second-key"):
            assert run(with_key(url, key), lambda client: result(client, "list_knowledge_bases"))
        for headers in (
            {},
            {"Authorization": "Bearer first"},
            {"Authorization": "Basic first-key"},
            {"Authorization": "first-key"},
        ):
            refused = httpx2.post(url, headers=headers, json={})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        with pytest.raises(ExceptionGroup):
            run(with_key(url, "wrong-key"), lambda client: client.list_tools())


def test_http_elsewhere_than_loopback_needs_a_key(environment, command):
    failed = command("mcp", "--http", "--host", "0.0.0.0", "--port", "0", code=1)
    assert "0.0.0.0 can be reached from other machines: set KVWEAVE_API_KEY" in failed.stderr
    assert "other machines" in command("mcp", "--http", "--host", "example.org", code=1).stderr


def test_a_taken_port_is_one_line(environment, command):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = command("mcp", "--http", "--port", port, code=1)
    assert f"cannot listen on 127.0.0.1:{port}" in failed.stderr
    assert "name another --port" in failed.stderr


def test_without_the_extra_the_command_names_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert "pip install 'kvweave[mcp]'" in command("mcp", code=1).stderr


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("evil.localhost", False),
    ],
)
def test_what_is_loopback(host, loopback):
    assert is_loopback(host) is loopback
