import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from store_samples import DIGEST, ISOLATED, SYSTEM, chunk, note, same, same_note

from kvweave.core import ChunkKV, ChunkNote, Making
from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.store import format as entry_format
from kvweave.store.format import Content, encode_entry, open_entry, read_entry, write_entry
from kvweave.store.keys import EntryKey, digest_tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOTE_DTYPES = [*DTYPES, torch.int32, torch.int64, torch.uint8]
SMALL: list[Content] = [
    ChunkKV((3, 4), torch.randn(2, 2, 1, 2, 2, dtype=torch.float32).to(torch.bfloat16)),
    note(1, tokens=2),
]


def key_of(content: Content, making: Making | None = None) -> EntryKey:
    tokens = digest_tokens(content.token_ids)
    if isinstance(content, ChunkKV):
        return EntryKey("default", "a" * 32, tokens, making or ISOLATED)
    return EntryKey("default", "a" * 32, tokens, making or DIGEST, "note")


def written(path: Path, content: Content) -> Path:
    write_entry(path, encode_entry(key_of(content), "tiny", content, ["source"]))
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: torch.dtype) -> None:
    kv = chunk(1, tokens=7, dtype=dtype)
    bits = kv.kv.view(torch.uint8)
    bits[0, 0, 0, 0] = 0xFF  # a NaN with a payload survives too
    path = written(tmp_path / "entry", kv)
    found = read_entry(path, key_of(kv), kv.token_ids)
    assert found.kv.dtype == dtype
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
    assert path.stat().st_size == entry.bytes
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
def test_any_note_round_trips_and_is_aligned(
    tmp_path_factory: pytest.TempPathFactory,
    forms: dict[str, tuple[torch.dtype, list[int]]],
    tokens: int,
    strided: bool,
) -> None:
    tensors = {name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in forms.items()}
    if strided:
        tensors = {name: tensor.permute(tuple(range(tensor.dim()))[::-1]) for name, tensor in tensors.items()}
    one = ChunkNote(tuple(range(tokens)), tensors)
    path = tmp_path_factory.mktemp("entry") / "entry"
    entry = encode_entry(key_of(one), "tiny", one, [])
    write_entry(path, entry)
    assert path.stat().st_size == entry.bytes
    found = read_entry(path, key_of(one), one.token_ids)
    assert isinstance(found, ChunkNote)
    assert same_note(found, one)
    assert all(t.data_ptr() % t.element_size() == 0 for t in found.tensors.values() if t.numel())
    assert load_file(path).keys() == {"token_ids", *tensors}


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


def test_what_the_file_says_about_itself_is_kept(tmp_path: Path) -> None:
    kv = chunk(1)
    making = Making("observed", (SYSTEM, "neighbour ü"), exact=False, rope_regime="long")
    key = EntryKey("notes", "b" * 32, digest_tokens(kv.token_ids), making)
    write_entry(tmp_path / "entry", encode_entry(key, "some/model", kv, ["one", "two"]))
    stored = open_entry(tmp_path / "entry")
    assert (stored.key, stored.model_name, stored.sources) == (key, "some/model", ("one", "two"))


@pytest.mark.parametrize("content", SMALL, ids=["kv", "note"])
def test_every_single_flipped_bit_is_detected(tmp_path: Path, content: Content) -> None:
    key = key_of(content)
    path = written(tmp_path / "entry", content)
    whole = path.read_bytes()
    unnoticed = []
    for bit in range(len(whole) * 8):
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        try:
            read_entry(path, key, content.token_ids)
        except DamagedEntry:
            continue
        unnoticed.append(bit)
    assert not unnoticed


@pytest.mark.parametrize("content", SMALL, ids=["kv", "note"])
def test_every_truncation_is_detected(tmp_path: Path, content: Content) -> None:
    path = written(tmp_path / "entry", content)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedEntry):
            read_entry(path, key_of(content), content.token_ids)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedEntry):
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
        read_entry(path, key_of(kv, Making("bare", ())), kv.token_ids)
    with pytest.raises(DamagedEntry, match="other tokens"):
        read_entry(path, key_of(kv), (*kv.token_ids[:-1], 9))


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk(1)
    with monkeypatch.context() as patch:
        patch.setattr(entry_format, "FORMAT_VERSION", 2)
        path = written(tmp_path / "entry", kv)
    with pytest.raises(StoreTooNew, match="format version 2"):
        read_entry(path, key_of(kv), kv.token_ids)


def test_a_missing_file_is_told_from_one_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = chunk(1)
    with pytest.raises(FileNotFoundError):
        read_entry(tmp_path / "none", key_of(kv), kv.token_ids)

    def no_descriptors(*_: object, **__: object) -> None:
        raise FileNotFoundError("No such file or directory")  # what safetensors makes of EMFILE

    monkeypatch.setattr(entry_format, "safe_open", no_descriptors)
    with pytest.raises(OSError, match="cannot be opened") as caught:
        read_entry(written(tmp_path / "entry", kv), key_of(kv), kv.token_ids)
    assert not isinstance(caught.value, FileNotFoundError)


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
def test_what_cannot_be_stored_is_refused(tensor: torch.Tensor) -> None:
    kv = ChunkKV(tuple(range(5)), tensor)
    with pytest.raises(InvalidRequest, match="kv has"):
        encode_entry(key_of(kv), "tiny", kv, [])


@pytest.mark.parametrize(
    "name", ["kv", "token_ids", "Kept", "", "1st", "a-b", "a b", "__metadata__", "kept\n"]
)
def test_a_note_with_another_name_is_refused(name: str) -> None:
    one = ChunkNote((1, 2), {name: torch.zeros(2)})
    with pytest.raises(InvalidRequest, match="a note's tensor is named"):
        encode_entry(key_of(one), "tiny", one, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.int16])
def test_a_note_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    one = ChunkNote((1, 2), {"kept": torch.zeros(2, dtype=dtype)})
    with pytest.raises(InvalidRequest, match=r"kept has dtype .* may hold float32, bfloat16"):
        encode_entry(key_of(one), "tiny", one, [])
