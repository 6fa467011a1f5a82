import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.kvstore import header
from kvweave.kvstore.format import (
    Content,
    encode_entry,
    open_entry,
    parse_entry,
    storage_of,
    verify_content,
)
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.ops.quantise import QuantisedKV
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, Storage
from support.store_samples import (
    DIGEST,
    ISOLATED,
    SYSTEM,
    chunk,
    feature,
    quantised_chunk,
    read_entry,
    same,
    same_feature,
    write_entry,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTE_DTYPES = [*DTYPES, torch.int32, torch.int64, torch.uint8]
SMALL: list[Content] = [
    ChunkKV((3, 4), torch.randn(2, 2, 1, 2, 2, dtype=torch.float32).to(torch.bfloat16)),
    feature(1, tokens=2),
    quantised_chunk(1, "int8", tokens=2),
    quantised_chunk(1, "int4", tokens=2),
]
KINDS = ["kv", "note", "int8", "int4"]
STORAGES: list[Storage] = ["int8", "int4"]


def key_of(content: Content, provenance: KVProvenance | None = None) -> EntryKey:
    tokens = digest_tokens(content.token_ids)
    if isinstance(content, ChunkKV):
        provenance = quantised(provenance or ISOLATED, storage_of(content))
        return EntryKey("default", "a" * 32, tokens, provenance)
    return EntryKey("default", "a" * 32, tokens, provenance or DIGEST, "note")


def written(path: Path, content: Content) -> Path:
    write_entry(path, encode_entry(key_of(content), "tiny", content, ["source"]))
    return path


def same_content(found: Content, expected: Content) -> bool:
    if isinstance(found, ChunkKV):
        return isinstance(expected, ChunkKV) and same(found, expected)
    return isinstance(expected, ChunkFeature) and same_feature(found, expected)


def read_whole(path: Path, content: Content) -> Content:
    """The content of the file at `path`, which must be this one, verified completely."""
    found = read_entry(path, key_of(content), content.token_ids)
    verify_content(found)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    kv = chunk(1, tokens=7, dtype=dtype)
    bits = kv.kv.view(torch.uint8)
    bits[0, 0, 0, 0] = 0xFF  # a NaN with a payload survives too
    path = written(tmp_path / "entry", kv)
    found = read_entry(path, key_of(kv), kv.token_ids)
    assert isinstance(found, ChunkKV)
    assert found.kv.dtype == dtype
    assert torch.equal(found.layer(1).view(torch.uint8), bits[1])
    assert torch.equal(found.kv.view(torch.uint8), bits)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(0, 9), st.integers(1, 5)),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
)
def test_any_shape_round_trips_and_is_aligned(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: torch.dtype, strided: bool
) -> None:
    tensor = torch.randn(shape).to(dtype)
    if strided:
        tensor = tensor.transpose(2, 3).contiguous().transpose(2, 3)
    kv = ChunkKV(tuple(range(shape[3])), tensor)
    path = tmp_path_factory.mktemp("entry") / "entry"
    entry = encode_entry(key_of(kv), "tiny", kv, [])
    write_entry(path, entry)
    assert path.stat().st_size == sum(map(len, entry))
    found = read_entry(path, key_of(kv), kv.token_ids)
    assert same(found, kv)
    assert found.kv.data_ptr() % 64 == 0


@settings(max_examples=25, deadline=None)
@given(
    forms=st.dictionaries(
        st.sampled_from(["a", "b", "c_1", "keys", "token_ids_", "kvs"]),
        st.tuples(st.sampled_from(NOTE_DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    ),
    tokens=st.integers(0, 5),
    strided=st.booleans(),
)
def test_any_feature_round_trips_and_is_aligned(
    tmp_path_factory: pytest.TempPathFactory,
    forms: dict[str, tuple[torch.dtype, list[int]]],
    tokens: int,
    strided: bool,
) -> None:
    tensors = {name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in forms.items()}
    if strided:
        tensors = {name: tensor.permute(tuple(range(tensor.dim()))[::-1]) for name, tensor in tensors.items()}
    one = ChunkFeature(tuple(range(tokens)), tensors)
    path = tmp_path_factory.mktemp("entry") / "entry"
    entry = encode_entry(key_of(one), "tiny", one, [])
    write_entry(path, entry)
    assert path.stat().st_size == sum(map(len, entry))
    found = read_entry(path, key_of(one), one.token_ids)
    assert isinstance(found, ChunkFeature)
    assert same_feature(found, one)
    assert all(t.data_ptr() % t.element_size() == 0 for t in found.tensors.values() if t.numel())
    assert load_file(path).keys() == {"token_ids", *tensors}


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 3), st.integers(0, 9), st.integers(1, 5)),
    dtype=st.sampled_from(DTYPES),
    storage=st.sampled_from(STORAGES),
)
def test_quantised_kv_is_read_as_stored(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: torch.dtype, storage: Storage
) -> None:
    kv = quantised_chunk(3, storage, tokens=shape[3], like=torch.randn(shape).to(dtype))
    assert isinstance(kv.data, QuantisedKV)
    path = written(tmp_path_factory.mktemp("entry") / "entry", kv)
    found = read_whole(path, kv)
    assert isinstance(found, ChunkKV)
    assert storage_of(found) == storage
    assert same(found, kv)
    assert all(torch.equal(found.layer(i), kv.layer(i)) for i in range(shape[0]))
    stored = load_file(path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in kv.data.tensors().items())
    again = path.with_name("again")
    write_entry(again, encode_entry(key_of(kv), "tiny", found, ["source"]))
    assert (
        again.read_bytes() == path.read_bytes()
    )  # KV that was read is written again without a second quantisation


def test_an_entry_can_be_parsed_from_memory(tmp_path: Path) -> None:
    kv = chunk(1)
    data = torch.frombuffer(bytearray(written(tmp_path / "entry", kv).read_bytes()), dtype=torch.uint8)
    assert same(parse_entry(data, "somewhere").content, kv)
    data[-1] ^= 1
    with pytest.raises(DamagedEntry, match="somewhere is altered in layer 1"):
        verify_content(parse_entry(data, "somewhere").content)


def test_each_layer_is_verified_when_it_is_first_used(tmp_path: Path) -> None:
    kv = chunk(1, layers=3)
    path = written(tmp_path / "entry", kv)
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1  # in the last layer
    path.write_bytes(altered)
    reasons: list[str] = []
    found = read_entry(path, key_of(kv), kv.token_ids, reasons.append)
    assert isinstance(found, ChunkKV)
    for layer in (1, 0, 1):
        assert torch.equal(found.layer(layer), kv.kv[layer])
    assert reasons == []
    for read in (lambda: found.layer(2), lambda: found.kv, lambda: verify_content(found)):
        with pytest.raises(DamagedEntry, match="altered in layer 2"):
            read()
    assert set(reasons) == {f"{path} is altered in layer 2"}


@pytest.mark.parametrize("storage", STORAGES)
def test_quantised_kv_is_stored_only_under_a_quantised_provenance(storage: Storage) -> None:
    kv = quantised_chunk(1, storage)
    other = KVProvenance(f"isolated-{'int4' if storage == 'int8' else 'int8'}", (SYSTEM,), exact=False)
    for provenance in (ISOLATED, KVProvenance("similar-10", (SYSTEM,), exact=False), other):
        key = EntryKey("default", "a" * 32, digest_tokens(kv.token_ids), provenance)
        with pytest.raises(
            InvalidRequest, match=f"kv is stored as {storage}, its provenance is {provenance.kind}"
        ):
            encode_entry(key, "tiny", kv, [])


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    kv = chunk(1)
    tensors = load_file(written(tmp_path / "entry", kv))
    assert torch.equal(tensors["kv"], kv.kv)
    assert tensors["token_ids"].tolist() == list(kv.token_ids)


def test_reading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    kv = chunk(1, tokens=4096, layers=8)
    path = written(tmp_path / "entry", kv)
    found = read_entry(path, key_of(kv), kv.token_ids)
    address = found.kv.data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in (row[0].split("-") for row in ranges))
    path.unlink()
    assert torch.equal(found.kv, kv.kv)  # still valid without its name


def test_the_metadata_of_an_entry_is_kept(tmp_path: Path) -> None:
    kv = chunk(1)
    provenance = KVProvenance("observed", (SYSTEM, "neighbour ü"), exact=False, rope_regime="long")
    key = EntryKey("notes", "b" * 32, digest_tokens(kv.token_ids), provenance)
    write_entry(tmp_path / "entry", encode_entry(key, "some/model", kv, ["one", "two"]))
    stored = open_entry(tmp_path / "entry")
    assert (stored.key, stored.model_name, stored.sources) == (key, "some/model", ("one", "two"))


@pytest.mark.parametrize("content", SMALL, ids=KINDS)
def test_every_single_flipped_bit_is_detected(tmp_path: Path, content: Content) -> None:
    data = np.frombuffer(written(tmp_path / "entry", content).read_bytes(), dtype=np.uint8).copy()
    unnoticed = []
    for bit in range(data.size * 8):
        data[bit // 8] ^= 1 << bit % 8
        try:
            verify_content(parse_entry(torch.from_numpy(data), "file").content)
            unnoticed.append(bit)
        except DamagedEntry:
            pass
        data[bit // 8] ^= 1 << bit % 8
    assert not unnoticed
    assert same_content(parse_entry(torch.from_numpy(data), "file").content, content)


@pytest.mark.parametrize("content", SMALL, ids=KINDS)
def test_every_truncation_is_detected(tmp_path: Path, content: Content) -> None:
    path = written(tmp_path / "entry", content)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedEntry):
            read_entry(path, key_of(content), content.token_ids)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedEntry, match="instead of"):
        read_entry(path, key_of(content), content.token_ids)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04" + b"x" * 500, b"{}", b"\xff" * 64])
def test_a_foreign_file_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "entry").write_bytes(content)
    with pytest.raises(DamagedEntry, match="entry"):
        read_entry(tmp_path / "entry", key_of(chunk(1)), chunk(1).token_ids)


@pytest.mark.parametrize(
    "tensors",
    [{}, {"kv": torch.zeros(1, 2, 1, 1, 1)}, {"kv": torch.zeros(1), "token_ids": torch.zeros(1)}],
)
def test_another_safetensors_file_is_damage(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "entry")
    with pytest.raises(DamagedEntry):
        read_entry(tmp_path / "entry", key_of(chunk(1)), chunk(1).token_ids)


def test_another_key_or_other_tokens_are_damage(tmp_path: Path) -> None:
    kv = chunk(1)
    path = written(tmp_path / "entry", kv)
    with pytest.raises(DamagedEntry, match="not"):
        read_entry(path, key_of(kv, KVProvenance("bare", ())), kv.token_ids)
    with pytest.raises(DamagedEntry, match="other tokens"):
        read_entry(path, key_of(kv), (*kv.token_ids[:-1], 9))


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with monkeypatch.context() as patch:
        patch.setattr(header, "FORMAT_VERSION", 9)
        path = written(tmp_path / "entry", kv)
    with pytest.raises(StoreTooNew, match="format version 9, this kvweave reads up to 2; upgrade"):
        read_entry(path, key_of(kv), kv.token_ids)


def test_an_older_format_is_named_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with monkeypatch.context() as patch:
        patch.setattr(header, "FORMAT_VERSION", 1)
        path = written(tmp_path / "entry", kv)
    with pytest.raises(DamagedEntry, match="format version 1, which is not read any more"):
        read_entry(path, key_of(kv), kv.token_ids)


def test_a_missing_file_and_one_that_cannot_be_opened_raise_different_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = chunk(1)
    with pytest.raises(FileNotFoundError):
        read_entry(tmp_path / "none", key_of(kv), kv.token_ids)

    path = written(tmp_path / "entry", kv)
    with monkeypatch.context() as patch:

        def no_memory(*_: object, **__: object) -> None:
            raise RuntimeError("unable to mmap 100 bytes")

        patch.setattr(torch, "from_file", no_memory)
        with pytest.raises(OSError, match="cannot be mapped") as caught:
            read_entry(path, key_of(kv), kv.token_ids)
        assert not isinstance(caught.value, FileNotFoundError)

        def removed_meanwhile(*_: object, **__: object) -> None:
            path.unlink()
            raise RuntimeError("unable to open file")

        patch.setattr(torch, "from_file", removed_meanwhile)
        with pytest.raises(FileNotFoundError):
            read_entry(path, key_of(kv), kv.token_ids)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(*(("os.fsync", fail) if step == "fsync" else (Path, "rename", fail)))
    with pytest.raises(OSError, match="broken"):
        written(tmp_path / "entry", chunk(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2, 1, 5),
        torch.zeros(2, 1, 1, 5, 4),
        torch.zeros(2, 2, 1, 4, 4),
        torch.zeros(2, 2, 1, 5, 4).long(),
    ],
)
def test_kv_of_another_shape_or_dtype_is_refused(tensor: torch.Tensor) -> None:
    kv = ChunkKV(tuple(range(5)), tensor)
    with pytest.raises(InvalidRequest, match="kv has"):
        encode_entry(key_of(kv), "tiny", kv, [])


@pytest.mark.parametrize(
    "name", ["kv", "token_ids", "Kept", "", "1st", "a-b", "a b", "__metadata__", "kept\n"]
)
def test_a_feature_with_an_invalid_tensor_name_is_refused(name: str) -> None:
    one = ChunkFeature((1, 2), {name: torch.zeros(2)})
    with pytest.raises(InvalidRequest, match="a feature's tensor is named"):
        encode_entry(key_of(one), "tiny", one, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int16])
def test_a_feature_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    one = ChunkFeature((1, 2), {"kept": torch.zeros(2, dtype=dtype)})
    with pytest.raises(InvalidRequest, match=r"kept has dtype .* may hold float32, bfloat16"):
        encode_entry(key_of(one), "tiny", one, [])
