"""KV with queries in the store: a separate entry, verified layer by layer, the same from every tier."""

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from store_samples import (
    ISOLATED,
    MODEL,
    chunk,
    chunk_with_queries,
    entry_files,
    get,
    put,
    quantised_chunk,
    read_entry,
    same,
    write_entry,
)

from kvweave.errors import DamagedEntry, InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import encode_entry, parse_entry
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised, with_queries
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.types import ChunkKV, KVProvenance

QKV = with_queries(ISOLATED)


def key(kv: ChunkKV, provenance: KVProvenance = QKV) -> EntryKey:
    return EntryKey("default", "a" * 32, digest_tokens(kv.token_ids), provenance)


def data_of(kv: ChunkKV, provenance: KVProvenance = QKV) -> bytes:
    return b"".join(encode_entry(key(kv, provenance), "tiny", kv, ["source"]).parts)


def test_an_entry_without_queries_has_the_same_bytes_as_before_queries_existed() -> None:
    kv = ChunkKV((1, 2, 3), torch.arange(48, dtype=torch.float32).reshape(2, 2, 1, 3, 4))
    data = data_of(kv, ISOLATED)
    assert blake2b(data, digest_size=16).hexdigest() == "4626e48e42d5ba5af7a8c6b3fb8fd0bf"
    assert b"quer" not in data


def test_the_file_holds_the_kv_followed_by_the_queries(tmp_path: Path) -> None:
    kv = chunk_with_queries(1)
    path = tmp_path / "entry"
    path.write_bytes(data_of(kv))
    tensors = load_file(path)
    assert tensors.keys() == {"token_ids", "kv", "queries"}
    assert isinstance(kv.queries, torch.Tensor)
    assert torch.equal(tensors["kv"], chunk(1).kv)
    assert torch.equal(tensors["queries"], kv.queries)
    found = read_entry(path, key(kv), kv.token_ids)
    assert isinstance(found, ChunkKV)
    assert same(found, kv)
    assert found.bytes == kv.bytes == kv.kv.nbytes + kv.queries.nbytes
    write_entry(tmp_path / "again", encode_entry(key(kv), "tiny", found, ["source"]))  # KV that was read
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_layer_of_queries_is_verified_when_it_is_first_used() -> None:
    kv = chunk_with_queries(1, layers=3)
    data = bytearray(data_of(kv))
    data[-1] ^= 1  # in the last layer's queries
    reasons: list[str] = []
    found = parse_entry(torch.frombuffer(data, dtype=torch.uint8), "file", reasons.append).content
    assert isinstance(found, ChunkKV)
    assert torch.equal(found.kv, kv.kv)  # reading only KV reads no queries
    assert torch.equal(found.layer_queries(1), kv.layer_queries(1))
    assert reasons == []
    with pytest.raises(DamagedEntry, match="altered in layer 2"):
        found.layer_queries(2)
    assert reasons == ["file is altered in layer 2"]


def test_the_provenance_must_say_whether_there_are_queries() -> None:
    with pytest.raises(InvalidRequest, match="kv with queries has the provenance isolated;"):
        data_of(chunk_with_queries(1), ISOLATED)
    with pytest.raises(InvalidRequest, match="kv without queries has the provenance isolated-qkv;"):
        data_of(chunk(1))


@pytest.mark.parametrize(
    "queries",
    [torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 5, 4), torch.zeros(2, 3, 5, 2), torch.zeros(2, 1, 3, 5, 4)],
)
def test_queries_of_another_shape_are_refused(queries: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match=r"beside this kv it must be \(2, H, 5, 4\)"):
        data_of(replace(chunk(1), queries=queries))


def test_queries_are_stored_only_with_exact_kv_of_their_dtype() -> None:
    with pytest.raises(InvalidRequest, match="both must have one dtype"):
        data_of(replace(chunk(1), queries=torch.zeros(2, 3, 5, 4, dtype=torch.bfloat16)))
    coded = replace(quantised_chunk(1, "int8"), queries=torch.zeros(2, 3, 5, 4))
    with pytest.raises(InvalidRequest, match="kv is stored as int8, its provenance is isolated-qkv"):
        data_of(coded, QKV)
    with pytest.raises(InvalidRequest, match="kv with queries has the provenance isolated-int8;"):
        data_of(coded, quantised(ISOLATED, "int8"))


def test_entries_with_queries_and_without_are_separate(tmp_path: Path) -> None:
    plain, kv = chunk(1), chunk_with_queries(1)
    with ChunkStore(tmp_path) as store:
        assert put(store, plain)
        assert get(store, plain, QKV) is None
        assert put(store, kv, QKV)
        assert len(entry_files(tmp_path)) == 2
        assert set(store.versions(MODEL, [kv.token_ids])[0]) == {ISOLATED, QKV}
    with ChunkStore(tmp_path) as store:  # from the disk
        assert same(get(store, plain), plain)
        assert same(get(store, kv, QKV), kv)
        assert store.verify().damaged == ()


def test_a_store_drops_an_entry_whose_queries_are_damaged(tmp_path: Path) -> None:
    kv = chunk_with_queries(1)
    with ChunkStore(tmp_path) as store:
        put(store, kv, QKV)
    (path,) = entry_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with ChunkStore(tmp_path) as store:
        assert get(store, kv, QKV) is None
        assert not entry_files(tmp_path)
        assert store.stats().damaged == 1


def test_memory_tiers_hold_queries_too(tmp_path: Path) -> None:
    kv = chunk_with_queries(1)
    with ChunkStore(tmp_path, host_bytes=10**6) as store:
        put(store, kv, QKV)
        for _ in range(3):
            assert same(get(store, kv, QKV), kv)
    tier = DeviceTier(torch.device("cpu"), kv.bytes)
    read = parse_entry(torch.frombuffer(bytearray(data_of(kv)), dtype=torch.uint8), "file")
    assert isinstance(read.content, ChunkKV)
    assert tier.admit(read, 1.0)
    held = tier.peek(read.key.digest)
    assert same(held, kv)
    assert held is not None
    assert isinstance(held.queries, torch.Tensor)
    assert tier.used_bytes == kv.bytes
    assert not DeviceTier(torch.device("cpu"), kv.bytes - 1).admit(read, 1.0)
