"""Limits of bodies, connections and clients; keys, tenants, origins; names of files."""

import gzip
import hashlib
import io
import json
import socket
import time
import zipfile
from contextlib import ExitStack

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.config import ServerConfig, read_config
from kvweave.errors import InvalidRequest
from kvweave.server.process.lifecycle import check_binding
from kvweave.server.serving.tenants import Tenants, read_tenants
from kvweave.server.uploads import clean_name

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def reply_to(running, data, wait_s=10):
    with socket.create_connection(running.address, timeout=wait_s) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_a_websocket_is_an_ordinary_request_that_needs_a_key(fake):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    with fake(key="first-key", api_key="first-key") as running:
        found = reply_to(
            running, b"GET /v1/kb HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + upgrade
        )
    assert found.startswith(b"HTTP/1.1 401 ")


# Bodies


def test_a_body_that_is_too_large_is_refused(fake):
    with fake(max_body_bytes=1000) as running:
        large = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
        found = running.http.post("/v1/chat/completions", content=large)
        assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")

        def parts():  # without a declared length
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        found = running.http.post(
            "/v1/chat/completions", content=parts(), headers={"Content-Type": "application/json"}
        )
        assert found.status_code == 413
        assert running.http.post("/v1/chat/completions", json=BODY).status_code == 200


def test_a_body_that_comes_too_slowly_is_refused(fake):
    with fake(client_timeout_s=0.3) as running:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        began = time.monotonic()
        assert b" 408 " in reply_to(running, head)
        assert time.monotonic() - began < 5


def test_drops_of_a_body_do_not_hold_a_connection_for_ever(fake):
    with (
        fake(client_timeout_s=0.5) as running,
        socket.create_connection(running.address, timeout=10) as connection,
    ):
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        )
        began = time.monotonic()
        connection.settimeout(0.2)
        assert _is_closed(connection, b" ", 10)
        assert time.monotonic() - began < 5


def _is_closed(connection, dropped, timeout_s):
    """Send drops until the other side has closed the connection."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            connection.sendall(dropped)
            if not connection.recv(1000):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_headers_that_do_not_come_end_the_connection(fake):
    with fake(client_timeout_s=0.3) as running:
        assert reply_to(running, b"") == b""
        assert reply_to(running, b"GET /health HTTP/1.1\r\nHost: loc") == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": "\xc3\x28"}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_broken_bodies_are_400(fake, body):
    with fake() as running:
        found = running.http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert found.status_code == 400
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_what_is_no_http_is_400(fake):
    with fake() as running:
        assert b" 400 " in reply_to(running, b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n")
        assert running.http.get("/health").status_code == 200


# Connections


def test_thousands_of_idle_connections_make_room_and_disturb_no_question(fake):
    with fake(client_timeout_s=30.0) as running, ExitStack() as idle:
        engine = running.parts.serving
        engine.pieces_may_go.clear()
        with running.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as asked:
            for _ in range(2000):
                idle.enter_context(socket.create_connection(running.address))
            with httpx.Client(base_url=running.url, trust_env=False) as other:
                assert other.get("/health").status_code == 200
            engine.pieces_may_go.set()
            assert list(asked.iter_lines())[-2] == "data: [DONE]"
        assert len(running.running.server_state.connections) <= 1000


def test_connections_that_are_all_busy_refuse_a_new_one(fake):
    with fake(max_connections=3, max_running=4) as running, ExitStack() as opened:
        engine = running.parts.serving
        engine.pieces_may_go.clear()
        content = json.dumps(BODY).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        busy = []
        for count in range(1, 4):
            busy.append(opened.enter_context(socket.create_connection(running.address)))
            busy[-1].sendall(head.encode() + content)
            running.wait(lambda count=count: engine.running == count)
        one_more = opened.enter_context(socket.create_connection(running.address, timeout=5))
        assert _is_closed(one_more, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 5)
        engine.pieces_may_go.set()
        for each in busy:
            assert each.recv(100).startswith(b"HTTP/1.1 200")


# Keys


def test_without_a_key_only_this_machine_may_be_served():
    for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1"):
        check_binding(ServerConfig(host=host))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(InvalidRequest, match="--api-key"):
            check_binding(ServerConfig(host=host))
        check_binding(ServerConfig(host=host, api_key="a-long-key"))


@pytest.mark.parametrize("key", [None, "wrong-key", "first-key-", "\u00fc"])
def test_a_missing_or_wrong_key_is_401(fake, key):
    with fake(api_key="first-key, second-key", key="second-key") as running:
        headers = {"Authorization": f"Bearer {key}".encode()} if key else {"Authorization": ""}
        found = running.http.post("/v1/chat/completions", content=b"{", headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert running.http.get("/metrics", headers=headers).status_code == 401
        assert running.http.get("/health", headers={"Authorization": ""}).status_code == 200
        assert running.http.post("/v1/chat/completions", json=BODY).status_code == 200


def test_tenants_have_keys_of_their_own_and_do_not_see_the_metrics(fake, tmp_path):
    hashed = hashlib.sha256(b"key-of-brian").hexdigest()
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants]\nanna = "key-of-anna"\nbrian = "sha256:{hashed}"\n')
    with fake(tenants=str(file), api_key="operators-key", key="key-of-anna") as running:
        tenant = running.parts.serving.tenant
        assert [tenant(key).name for key in ("key-of-anna", "key-of-brian", "operators-key")] == [
            "anna",
            "brian",
            None,
        ]
        assert running.http.get("/v1/kb").status_code == 200
        for path in ("/metrics", "/v1/settings"):
            assert running.http.get(path).status_code == 403
            assert (
                running.http.get(path, headers={"Authorization": "Bearer operators-key"}).status_code == 200
            )


@pytest.mark.parametrize(
    "key", ["sha256:xyz12345", "SHA256:" + "a" * 64, "sha256:" + "a" * 63, "Sha256: word"]
)
def test_a_mistyped_digest_is_no_key(tmp_path, key):
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants]\nanna = "{key}"\n')
    with pytest.raises(InvalidRequest, match=r"'anna' begins with sha256:.* 64 hexadecimal digits"):
        read_tenants(file)
    with pytest.raises(InvalidRequest, match="an API key of the server begins with sha256:"):
        Tenants({"sha256:" + "a" * 64: None})


def test_settings_show_no_key(fake):
    with fake(api_key="a-secret-key", key="a-secret-key") as running:
        found = running.http.get("/v1/settings")
        assert "a-secret-key" not in found.text
        rows = {each["name"]: each for each in found.json()["data"]}
        assert rows["port"]["default"] == 8420
        assert rows["ping_s"]["value"] == 0.2
        assert all(each["help"] for each in rows.values())


# Pages of other origins


def test_pages_of_other_origins_are_refused(fake):
    with fake() as running:

        def status(**headers):
            return running.http.post("/v1/chat/completions", json=BODY, headers=headers).status_code

        assert status(Origin="http://evil.example") == 403
        assert status(Origin="null") == 403
        assert status(Origin=running.url) == 200
        assert status(Host="evil.example") == 403  # a name that was pointed at this machine
        assert status(Host="localhost:1234") == 200


def test_allowed_origins_get_cors_headers(fake):
    with fake(cors_origins="http://app.example") as running:
        headers = {"Origin": "http://app.example", "Access-Control-Request-Method": "POST"}
        asked = running.http.options("/v1/chat/completions", headers=headers)
        assert asked.headers["Access-Control-Allow-Origin"] == "http://app.example"
        found = running.http.post("/v1/chat/completions", json=BODY, headers={"Origin": "http://app.example"})
        assert found.status_code == 200
        assert "X-Kvweave-Cache" in found.headers["Access-Control-Expose-Headers"]


def test_request_ids_are_taken_or_made(fake):
    with fake() as running:
        assert (
            running.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
        )
        for unusable in ("a b", "x" * 200, '"{}'):
            made = running.http.get("/health", headers={"X-Request-Id": unusable}).headers["X-Request-Id"]
            assert made.startswith("req_")


# Uploads


@pytest.mark.parametrize(
    ("given_name", "clean"),
    [
        ("notes.md", "notes.md"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\windows\\system.ini", "system.ini"),
        ("/etc/shadow", "shadow"),
        (".bashrc", "bashrc"),
        ("a\0b\r\nc.txt", "abc.txt"),
        ("\u202etxt.exe", "txt.exe"),
        ("Überblick für alle.txt", "Überblick für alle.txt"),
        ("x" * 500 + ".md", "x" * 197 + ".md"),
    ],
)
def test_names_of_uploads_stay_in_their_folder(given_name, clean):
    assert clean_name(given_name) == clean


@given(st.text())
def test_any_name_is_clean_or_refused(name):
    try:
        clean = clean_name(name)
    except InvalidRequest:
        return
    assert clean not in ("", ".", "..")
    assert not set(clean) & set("/\\\0\r\n")
    assert len(clean.encode()) <= 220
    assert not clean.startswith(".")


def upload(running, name, data, **more):
    return running.http.post("/v1/kb/notes/documents", files=[("files", (name, data))], **more)


def test_uploads_with_path_tricks_stay_inside(served):
    before = {path for path in served.parts.config.home.parent.rglob("*") if path.is_file()}
    found = upload(served, "../../../outside.txt", b"The code of the vault is 4711.")
    assert found.json()["added"] == ["outside.txt"]
    new = {path for path in served.parts.config.home.parent.rglob("*") if path.is_file()} - before
    assert [path.parent.parent.name for path in new if path.name == "outside.txt"] == ["uploads"]
    found = served.http.get("/v1/kb/notes").json()
    assert "outside.txt" in [each["source"] for each in found["documents"]]
    assert found["auto"]["result"] is None
    assert served.http.delete("/v1/kb/notes/documents", params={"source": "outside.txt"}).json() == {
        "removed": ["outside.txt"]
    }
    assert not any(path.exists() for path in new if path.name == "outside.txt")


@pytest.mark.parametrize("source", ["/", "..", "../../", "", "*", "passwords"])
def test_only_a_whole_source_removes_a_document(served, source):
    found = served.http.delete("/v1/kb/notes/documents", params={"source": source})
    assert found.status_code in (400, 404)
    assert len(served.http.get("/v1/kb/notes").json()["documents"]) == 2


def test_files_that_expand_are_bounded(served):
    bomb = gzip.compress(b"\0 " * (100 * 2**20))
    assert len(bomb) < 2**20
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.txt", b"0" * 10_000_000)
    for name, data in (
        ("bomb.txt.gz", bomb),
        ("bomb.zip", archive.getvalue()),
        ("bomb.docx", archive.getvalue()),
    ):
        found = upload(served, name, data).json()
        assert found["added"] == []
        assert [each["path"] for each in found["skipped"]] == [name]
    assert not list((served.parts.config.home / "uploads" / "notes").glob("bomb*"))


@pytest.mark.parametrize("data", [b"", b" \n", b"\0\1\2" * 500], ids=["empty", "blank", "binary"])
def test_a_version_that_cannot_be_read_leaves_the_earlier_one(served, data):
    file = served.parts.config.home / "uploads" / "notes" / "ferry.txt"
    assert upload(served, file.name, b"The ferry leaves at nine.").json()["added"] == [file.name]
    before = served.http.get("/v1/kb/notes").json()["documents"]
    report = upload(served, file.name, data).json()
    (skipped,) = report["skipped"]
    assert (skipped["path"], report["removed"], report["changed"]) == (file.name, [], [])
    assert skipped["reason"].endswith("; its earlier version stays")
    assert served.http.get("/v1/kb/notes").json()["documents"] == before
    assert file.read_bytes() == b"The ferry leaves at nine."
    assert [each.name for each in file.parent.iterdir() if each.name.startswith(".")] == []
    assert upload(served, file.name, b"The ferry leaves at ten.").json()["changed"] == [file.name]
    assert file.read_bytes() == b"The ferry leaves at ten."
    served.http.delete("/v1/kb/notes/documents", params={"source": file.name}).raise_for_status()


def test_an_upload_that_is_too_large_is_refused(fake):
    with fake(max_upload_bytes=1000) as running:
        found = running.http.post("/v1/kb/notes/documents", files=[("files", ("a.txt", b"x" * 5000))])
        assert found.status_code == 413


def test_an_upload_reports_its_progress(served):
    found = upload(served, "ferry.txt", b"The ferry leaves at nine.", headers={"Accept": "text/event-stream"})
    events = [line.removeprefix("event: ") for line in found.text.splitlines() if line.startswith("event")]
    assert events[-1] == "done"
    assert set(events[:-1]) == {"progress"}
    assert served.http.delete("/v1/kb/notes/documents", params={"source": "ferry.txt"}).status_code == 200


def test_an_upload_without_files_or_for_no_knowledge_base_is_refused(served):
    assert served.http.post("/v1/kb/notes/documents", data={"a": "b"}).status_code == 400
    assert served.http.post("/v1/kb/notes/documents", files=[("other", ("a.txt", b"x"))]).status_code == 400
    assert served.http.post("/v1/kb/nothing/documents", files=[("files", ("a.txt", b"x"))]).status_code == 404


# Settings


@pytest.mark.parametrize(
    ("name", "value"), [("port", 70_000), ("max_running", 0), ("ping_s", 0.0), ("max_queue", -1)]
)
def test_impossible_settings_are_refused(tmp_path, name, value):
    with pytest.raises(InvalidRequest, match=name):
        read_config(tmp_path, {}, **{name: value})
