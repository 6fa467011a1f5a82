"""What is remembered about model files is used only while the files are the same."""

import os
import shutil

import pytest
from transformers import AutoTokenizer

from kvweave.models import fingerprint, loading
from kvweave.models.fingerprint import ModelMemory
from kvweave.models.loading import load_model


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(loading.SHIPPED["reference"], tmp_path / "model")


@pytest.fixture
def computed(monkeypatch):
    """Count what a start computes: digests of weights and tokenizers, and tokenizers that transformers reads."""
    counts = []
    weights, tokens = fingerprint.digest_weights, AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        fingerprint, "digest_weights", lambda model: counts.append("weights") or weights(model)
    )
    monkeypatch.setattr(
        AutoTokenizer,
        "from_pretrained",
        lambda place, **options: counts.append("tokenizer") or tokens(place, **options),
    )
    return counts


def test_a_second_start_computes_nothing_and_finds_the_same(folder, tmp_path, computed):
    first = load_model(str(folder), home=tmp_path / "home")
    assert computed == ["tokenizer", "weights"]
    second = load_model(str(folder), home=tmp_path / "home")
    assert computed == ["tokenizer", "weights"]
    assert second.fingerprint == first.fingerprint
    assert fingerprint.digest_tokenizer(second.tokenizer) == fingerprint.digest_tokenizer(first.tokenizer)
    text = "The password of Glorric is <|endoftext|> walnut.\n\n  Où?"
    assert second.tokenizer(text)["input_ids"] == first.tokenizer(text)["input_ids"]
    assert second.template.tokenize(text) == first.template.tokenize(text)


def test_another_dtype_has_a_digest_of_its_own(folder, tmp_path):
    home = tmp_path / "home"
    digests = {
        load_model(str(folder), dtype=dtype, home=home).fingerprint.weights
        for dtype in ("float32", "bfloat16")
    }
    assert len(digests) == 2


def test_weights_changed_in_place_are_digested_again(folder, tmp_path):
    home, file = tmp_path / "home", folder / "model.safetensors"
    before = load_model(str(folder), home=home).fingerprint
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-2] ^= 1
    file.write_bytes(content)  # of the same length, under the same time of change
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load_model(str(folder), home=home).fingerprint.weights != before.weights


def test_a_tokenizer_that_is_more_than_its_file_is_read_by_its_own_class(
    folder, tmp_path, monkeypatch, computed
):
    monkeypatch.setattr(loading, "is_direct", lambda *args: False)
    for _ in range(2):
        load_model(str(folder), home=tmp_path / "home")
    assert computed.count("tokenizer") == 2


def test_a_damaged_or_unwritable_memory_is_as_good_as_none(folder, tmp_path):
    home = tmp_path / "home"
    memory = ModelMemory(folder, home)
    memory.put("a", "b")
    assert ModelMemory(folder, home).get("a") == "b"
    (file,) = (home / "models" / "facts").iterdir()
    file.write_bytes(b"\xff{")
    assert ModelMemory(folder, home).get("a") is None
    (tmp_path / "file").write_text("")
    ModelMemory(folder, tmp_path / "file").put("a", "b")


def test_nothing_is_remembered_of_files_that_change_meanwhile(folder, tmp_path):
    memory = ModelMemory(folder, tmp_path / "home")
    (folder / "config.json").touch()
    memory.put("a", "b")
    assert ModelMemory(folder, tmp_path / "home").get("a") is None


def test_weights_on_top_of_others_are_not_remembered(folder, tmp_path):
    (folder / "adapter_config.json").write_text("{}")
    ModelMemory(folder, tmp_path / "home").put("a", "b")
    assert not (tmp_path / "home").exists()
