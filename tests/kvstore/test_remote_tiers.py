"""Every remote tier passes the same checks: an entry that was put is returned bit for bit, and nothing else is.

How the store uses them, and its other tiers, is in `test_tiers_alike.py`.
"""

import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch

from kvweave.errors import DamagedEntry, InvalidRequest, TierUnavailable
from kvweave.kvstore.chunk_store import open_remote_tier
from kvweave.kvstore.format import Content, encode_entry, parse_entry, verify_content
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.kvstore.tiers.tier import RemoteTier, owned_copy
from kvweave.types import ChunkFeature, ChunkKV
from support.store_samples import ISOLATED, MODEL, chunk, feature
from support.tier_servers import CREDENTIALS, SHARED, Server, url_of


def entry(content: Content) -> tuple[str, bytes]:
    """The key and the bytes of an entry."""
    kind = "kv" if isinstance(content, ChunkKV) else "note"
    key = EntryKey("default", MODEL.digest, digest_tokens(content.token_ids), ISOLATED, kind)
    return key.digest, b"".join(encode_entry(key, "tiny", content, [key.tokens]))


@pytest.fixture(params=SHARED)
def tier(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[RemoteTier]:
    made = open_remote_tier(url_of(request.param, request, monkeypatch, tmp_path), secrets.token_hex(8))
    yield made
    made.close()


def same(found: Content, expected: Content) -> bool:
    if isinstance(expected, ChunkKV) and isinstance(found, ChunkKV):
        return found.token_ids == expected.token_ids and torch.equal(found.kv, expected.kv)
    assert isinstance(expected, ChunkFeature)
    assert isinstance(found, ChunkFeature)
    return all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_entries_are_returned_bit_for_bit(tier: RemoteTier) -> None:
    contents = [chunk(1), chunk(2, tokens=0), chunk(3, tokens=2000, dtype=torch.bfloat16), feature(4)]
    entries = dict(map(entry, contents))
    for key, data in entries.items():
        tier.put(key, data)
    absent = entry(chunk(99))[0]
    found = tier.get_many([absent, *entries])
    assert {key: bytes(data) for key, data in found.items()} == entries
    for (key, _), content in zip(map(entry, contents), contents, strict=True):
        stored = parse_entry(owned_copy(found[key]), key)
        verify_content(stored.content)
        assert same(stored.content, content)
    assert tier.has_many([absent, *entries]) == entries.keys()
    assert tier.sizes() == {key: len(data) for key, data in entries.items()}


def test_ranges_of_an_entry_are_returned_bit_for_bit(tier: RemoteTier) -> None:
    key, data = entry(chunk(3, tokens=50_000))  # larger than what clients split into several requests
    tier.put(key, data)
    size = len(data)
    for ranges in (
        [(0, 10)],
        [(0, size)],
        [(5, 6), (700_000, 1_900_000), (size - 1, size)],
        [(200, 300), (100, 250), (300, 400)],
        [(size - 7, size + 5)],
        [(0, 3), (size + 5, size + 9)],  # a truncated entry, as seen by a reader that trusts the header
        [(size - 7, size + 5), (size + 5, size + 9)],
    ):
        parts = tier.get_ranges(key, ranges)
        assert parts is not None
        assert [bytes(part) for part in parts] == [data[begin:end] for begin, end in ranges]


def test_a_range_beyond_a_truncated_entry_is_empty_and_the_tier_still_works(tier: RemoteTier) -> None:
    key, data = entry(chunk(1))
    tier.put(key, data[:100])
    parts = tier.get_ranges(key, [(200, 300)])
    assert parts is None or [bytes(part) for part in parts] == [b""]


@pytest.mark.parametrize("name", ["s3", "folder"])
def test_an_entry_deleted_during_a_request_is_missing(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = open_remote_tier(url_of(name, request, monkeypatch, tmp_path), secrets.token_hex(8))
    key, data = entry(chunk(1))
    tier.put(key, data[:100])
    head = obstore.head

    def delete_first(store: Any, path: str) -> Any:
        tier.delete([key])
        return head(store, path)

    monkeypatch.setattr(obstore, "head", delete_first)
    assert tier.get_ranges(key, [(200, 300)]) is None
    assert tier.sizes() == {}
    tier.close()


def test_an_empty_tier_returns_nothing(tier: RemoteTier) -> None:
    key = entry(chunk(1))[0]
    assert tier.get_ranges(key, [(0, 10)]) is tier.get_ranges(key, [(0, 10), (20, 30)]) is None
    assert tier.get_many([key]) == tier.get_many([]) == {}
    assert tier.has_many([key]) == tier.has_many([]) == frozenset()
    assert tier.sizes() == {}
    tier.delete([key])
    tier.delete([])


def test_deleting_removes_these_entries_and_no_others(tier: RemoteTier) -> None:
    entries = dict(entry(chunk(seed)) for seed in range(5))
    for key, data in entries.items():
        tier.put(key, data)
    kept, *gone = entries
    tier.delete([*gone, entry(chunk(99))[0]])
    assert tier.has_many(list(entries)) == {kept}
    assert tier.get_ranges(gone[0], [(0, 10)]) is None
    assert tier.sizes() == {kept: len(entries[kept])}
    assert bytes(tier.get_many(list(entries))[kept]) == entries[kept]


def test_putting_twice_keeps_one(tier: RemoteTier) -> None:
    key, data = entry(chunk(1))
    for _ in range(2):
        tier.put(key, data)
    assert tier.sizes() == {key: len(data)}
    assert bytes(tier.get_many([key])[key]) == data


def test_several_threads_may_use_it_at_once(tier: RemoteTier) -> None:
    entries = dict(entry(chunk(seed)) for seed in range(8))

    def put_and_get(key: str) -> bool:
        tier.put(key, entries[key])
        return bytes(tier.get_many([key])[key]) == entries[key]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(put_and_get, [*entries, *entries]))
    assert tier.sizes().keys() == entries.keys()


def test_altered_bytes_are_detected_by_the_reader(tier: RemoteTier) -> None:
    key, data = entry(chunk(1))
    altered = bytearray(data)
    altered[-3] ^= 16
    tier.put(key, altered)
    stored = parse_entry(owned_copy(tier.get_many([key])[key]), key)
    with pytest.raises(DamagedEntry, match="layer 1"):
        verify_content(stored.content)


@pytest.mark.parametrize("name", SHARED)
def test_namespaces_do_not_see_each_other(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = url_of(name, request, monkeypatch, tmp_path)
    names = (secrets.token_hex(4), f"{secrets.token_hex(4)}/ü {{*}}", secrets.token_hex(4) + "?")
    tiers = [open_remote_tier(url, namespace) for namespace in names]
    entries = [entry(chunk(seed)) for seed in range(3)]
    for tier, (key, data) in zip(tiers, entries, strict=True):
        tier.put(key, data)
    for tier, (key, data) in zip(tiers, entries, strict=True):
        assert tier.sizes() == {key: len(data)}
        tier.close()


def test_an_entry_evicted_by_the_redis_server_is_not_listed(redis: Server) -> None:
    from redis import Redis

    namespace = secrets.token_hex(8)
    tier = open_remote_tier(f"redis://127.0.0.1:{redis.port}/0", namespace)
    entries = dict(entry(chunk(seed)) for seed in range(3))
    for key, data in entries.items():
        tier.put(key, data)
    first, *rest = entries
    with Redis(port=redis.port) as client:
        assert client.delete(f"kvweave:{{{namespace}}}:{first}") == 1
    assert tier.get_many([first]) == {}
    assert tier.sizes().keys() == set(rest)
    tier.close()


def test_an_unreachable_tier_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    key, data = entry(chunk(1))
    for url in ("redis://somebody:secret@127.0.0.1:1/0", "s3://nowhere"):
        tier = open_remote_tier(url, "default")
        for attempt in (
            lambda tier=tier: tier.get_many([key]),
            lambda tier=tier: tier.get_ranges(key, [(0, 10), (20, 30)]),
            lambda tier=tier: tier.get_ranges(key, [(20, 30)]),
            lambda tier=tier: tier.put(key, data),
            lambda tier=tier: tier.delete([key]),
            lambda tier=tier: tier.has_many([key]),
            lambda tier=tier: tier.sizes(),
        ):
            with pytest.raises(TierUnavailable) as unavailable:
                attempt()
            assert "secret" not in str(unavailable.value)
            assert "\n" not in str(unavailable.value)
        tier.close()


def test_an_object_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(variable, value)
    asked = []
    monkeypatch.setattr(obstore, "head", lambda *given: asked.append(given))
    tier = open_remote_tier("s3://nowhere", "default")
    for begin in (0, 20):
        with pytest.raises(TierUnavailable):
            tier.get_ranges(entry(chunk(1))[0], [(begin, 30)])
    assert not asked
    tier.close()


@pytest.mark.parametrize("url", ["", "somewhere", "redis://host:port/0", "ftp://host/path", "s3://"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        open_remote_tier(url, "default")


def test_a_copy_is_aligned_and_independent() -> None:
    data = bytearray(entry(chunk(1))[1])
    copy = owned_copy(memoryview(data))
    assert copy.data_ptr() % 64 == 0
    before = copy.clone()
    data[0] ^= 1
    assert np.array_equal(copy.numpy(), before.numpy())


@pytest.mark.parametrize(
    "answer",
    [
        b"*4\r\x0brole\r\n",  # no number
        b":7\r\n",  # a number where a list belongs
        b"*1\r\n:7\r\n",
        b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
        b"$2\r\n\xe5\xe5\r\n",
        b"nothing of the protocol\r\n",
    ],
)
def test_an_answer_that_is_none_makes_redis_unavailable(answer: bytes) -> None:
    """Found by the campaign: a flipped bit on the way made the client raise what nobody caught."""
    with answering(answer) as port:
        tier = open_remote_tier(f"redis://127.0.0.1:{port}/0", "default")
        for call in (
            lambda: tier.get_many(["a"]),
            lambda: tier.get_ranges("a", [(0, 4)]),
            lambda: tier.put("a", b"x"),
            lambda: tier.has_many(["a"]),
            tier.sizes,
            lambda: tier.delete(["a"]),
        ):
            try:
                found = call()
            except TierUnavailable:
                continue
            assert not found or answer.startswith(b"*1")  # a list of one number may be a length
        tier.close()


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that gives one answer to everything; the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while connection.recv(1 << 16):
                connection.sendall(answer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield listener.getsockname()[1]
