"""The file of the real model is put together whole, with the expected digest, or not at all."""

import hashlib
import sys
import types

import pytest

from kvweave.errors import MissingExtra, ModelNotFound
from kvweave_lab import real_model
from support.gguf_files import write_gguf


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a tiny model's file in two parts, in place of the real one; returns the parts."""
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0")
    data = (tmp_path / "tiny.gguf").read_bytes()
    parts = [tmp_path / "part00", tmp_path / "part01"]
    parts[0].write_bytes(data[:5000])
    parts[1].write_bytes(data[5000:])
    module = types.ModuleType(real_model.PACKAGE)
    module.chunk_paths = lambda: parts
    monkeypatch.setitem(sys.modules, real_model.PACKAGE, module)
    monkeypatch.setattr(real_model, "find_spec", lambda name: object())
    monkeypatch.setattr(real_model, "EXPECTED_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(real_model, "licence_files", lambda: [tmp_path / "TERMS.html"])
    monkeypatch.setenv(real_model.VARIABLE, str(tmp_path / "cache"))
    return parts


def test_it_is_assembled_checked_converted_and_described(package, tmp_path, capsys):
    assert real_model.prepared_folder() is None
    real_model.main()
    shown = capsys.readouterr().out
    assert "Gemma Terms of Use" in shown
    assert str(tmp_path / "TERMS.html") in shown
    assert real_model.model_file() == tmp_path / "cache" / real_model.FILE_NAME
    assert (real_model.prepared_folder() / "model.safetensors").is_file()
    for part in package:
        part.unlink()
    real_model.main()  # without the packages' parts


def test_another_file_than_expected_is_refused(package, capsys):
    package[1].write_bytes(b"something else")
    with pytest.raises(ModelNotFound, match="has the SHA-256"):
        real_model.prepare()
    assert list(real_model.cache_folder().iterdir()) == []
    with pytest.raises(SystemExit, match="error: gemma"):
        real_model.main()


def test_without_the_packages_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv(real_model.VARIABLE, str(tmp_path))
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="make real"):
        real_model.prepare()
    assert real_model.licence_files() == []
